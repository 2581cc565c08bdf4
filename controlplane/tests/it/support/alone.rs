//! Tests of what their process uses, such as memory. Each has a process of its own, without the other tests.

use std::env;
use std::process::Command;

/// Set in the process of such a test.
const ALONE: &str = "KPLANE_TEST_ALONE";

/// Returns whether this process is that of one test. Otherwise runs the test, which has this path, in such a process, and
/// wants it to pass.
pub(crate) fn is_alone(test: &str) -> bool {
    if env::var_os(ALONE).is_some() {
        return true;
    }
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]);
    let output = command.env(ALONE, "1").output().unwrap();
    let [said, errors] =
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    // A name that no test has is no failure of the process.
    let is_passed = output.status.success() && said.contains("test result: ok. 1 passed");
    assert!(is_passed, "{}: {said}{errors}", output.status);
    false
}
