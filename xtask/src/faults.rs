//! `cargo xtask simulate --faults`: which tests find deliberate faults of the product.
//!
//! A copy of the product has all faults at once. Each is behind a condition, `kplane_model::fault(NUMBER)`, and a variable
//! of the environment chooses the one that a test program has. So one build does for all.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};

use crate::build::{TestProgram, compile};
use crate::cargo::{cargo, files, root, status};

/// The folder of faults: patches `NUMBER-NAME.patch`.
const FAULTS: &str = "nodeagent/tests/simulation/faults";
/// The folder of the faulty copy, the one in which it is made anew, and its target folder. They are not part of the workspace.
const COPY: &str = "target/faults/tree";
const NEW: &str = "target/faults/new";
const TARGET: &str = "target/faults/target";
/// The page with what was found, and its beginning.
const PAGE: &str = "docs/seeded-faults.md";
const HEAD: &str = "\
# Seeded faults

`cargo xtask simulate --faults --thorough` writes this page. Each fault of `nodeagent/tests/simulation/faults/` is a small
change that a plausible mistake would make, and tests should fail with it. They run in the order of their cost: 100 seeds of
the simulation, unit tests of the crate, 4,900 further seeds, all other unit tests, and then integration tests. The page names the first test that fails.
Without `--thorough`, only the first two run: what is missed then may be found later, and a reason is one by the code.
";

/// The crates with faults, and those whose tests find them.
const CRATES: &str = "kplane-model kplane-policy kplane-desired-state kplane-agents kplane-status-api kp-controlplane \
                      kplane-dataplane kplane-userproxy kp-nodeagent";

/// The function that the copy has, with the variable that chooses a fault.
const FUNCTION: &str = r#"
/// Returns whether this process has a fault.
pub fn fault(number: u32) -> bool {
    static CHOSEN: std::sync::OnceLock<Option<u32>> = std::sync::OnceLock::new();
    let chosen = || std::env::var("KPLANE_FAULT").ok()?.parse().ok();
    *CHOSEN.get_or_init(chosen) == Some(number)
}
"#;

/// Seconds after which a test program has found a fault, because it waits for something that does not come.
const PATIENCE: &str = "600";
/// The kinds of test programs with their arguments, in the order in which they run; the first two are quick.
const KINDS: [(&str, &[&str]); 5] = [
    ("simulation", &["--brief", "--seeds", "100"]),
    ("unit tests", &[]),
    (
        "simulation",
        &["--brief", "--from", "100", "--seeds", "4900"],
    ),
    ("unit tests", &[]),
    ("integration tests", &[]),
];
const QUICK: usize = 2;

/// What to do about a fault whose place in the product has changed.
const MISFIT: &str = "the fault does not fit the product any more; write it anew";

/// A deliberate fault.
#[derive(Default)]
struct Fault {
    number: u32,
    name: String,
    /// The file that has it.
    file: String,
    /// The line before the diff that says why no test finds it; may be empty.
    note: String,
    patch: PathBuf,
}

impl Fault {
    /// Reads a patch, whose lines ask for its number and no other.
    fn read(patch: PathBuf) -> Result<Self> {
        let text = fs::read_to_string(&patch)?;
        let stem = patch.file_stem().unwrap_or_default().to_string_lossy();
        let (number, name) = stem.split_once('-').context("a fault has no number")?;
        let (number, name) = (number.parse()?, name.replace('-', " "));
        let asked = format!("::fault({number})");
        let only = text.matches("::fault(").count() == text.matches(&asked).count();
        ensure!(
            only && text.contains(&asked),
            "{stem} does not ask for {number} alone"
        );
        let line = |start| {
            text.lines()
                .find_map(|line| line.strip_prefix(start))
                .unwrap_or_default()
                .to_owned()
        };
        let (file, note) = (line("+++ b/"), line("Missed: "));
        Ok(Self {
            number,
            name,
            file,
            note,
            patch,
        })
    }

    /// Applies it to a folder of the tree, or only checks that it fits.
    fn apply(&self, root: &Path, how: &str) -> Result<()> {
        let mut git = Command::new("git");
        git.current_dir(root).args(["apply", "-C1", how]).arg(&self.patch);
        status(&mut git).context(MISFIT)
    }
}

/// Returns all faults by their numbers, of which no two are the same.
fn all(root: &Path) -> Result<Vec<Fault>> {
    let entries = fs::read_dir(root.join(FAULTS))?;
    let mut all = entries.map(|entry| Fault::read(entry?.path())).collect::<Result<Vec<_>>>()?;
    all.sort_by_key(|fault| fault.number);
    for two in all.windows(2) {
        ensure!(
            two[0].number < two[1].number,
            "two faults have the number {}",
            two[0].number
        );
    }
    Ok(all)
}

/// Checks that each deliberate fault fits the product as it is.
pub(crate) fn fit(root: &Path) -> Result<()> {
    all(root)?.iter().try_for_each(|fault| fault.apply(root, "--check"))
}

/// Runs tests with each fault that has `name` in its name or in that of its file, or with all after a run without a fault.
/// The rows of other faults stay on [`PAGE`].
pub(crate) fn find(name: &str, thorough: bool) -> Result<()> {
    let root = root()?;
    let faults = all(root)?;
    let programs = build(root, &faults)?;
    if name.is_empty()
        && let Some((suite, how)) = first_to_fail(&programs, &Fault::default(), thorough)?
    {
        bail!("without a fault, {suite} fail: {how}");
    }
    let before = fs::read_to_string(root.join(PAGE)).unwrap_or_default();
    let begins = |fault: &Fault| format!("| {} | {} |", fault.number, fault.name);
    let row = |fault| before.lines().find(|line| line.starts_with(&begins(fault)));
    let not_run = |fault| format!("{} `{}` | not run yet | |", begins(fault), fault.file);
    let mut rows: Vec<String> = faults
        .iter()
        .map(|fault| row(fault).map_or_else(|| not_run(fault), ToOwned::to_owned))
        .collect();
    let chosen = |fault: &Fault| format!("{} {}", fault.patch.display(), fault.file).contains(name);
    for (fault, row) in faults.iter().zip(0..).filter(|(fault, _)| chosen(fault)) {
        let began = Instant::now();
        let found = first_to_fail(&programs, fault, thorough)?;
        let (suite, how) = found.unwrap_or_else(|| ("**none**".to_owned(), fault.note.clone()));
        println!("{} {suite}, {how} ({:?})", begins(fault), began.elapsed());
        rows[row] = format!("{} `{}` | {suite} | {how} |", begins(fault), fault.file);
        let missed = rows.iter().filter(|row| row.contains("| **none** |")).count();
        let sum = format!("Of {} faults, {missed} are missed.", rows.len());
        let title = "| | the product | in | found by | how |\n|---|---|---|---|---|";
        fs::write(
            root.join(PAGE),
            format!("{HEAD}\n{sum}\n\n{title}\n{}\n", rows.join("\n")),
        )?;
    }
    Ok(())
}

/// Makes the copy with all faults, and builds it. A file that is as in the last copy stays, so that little is built anew.
fn build(root: &Path, faults: &[Fault]) -> Result<Vec<TestProgram>> {
    let (new, copy) = (root.join(NEW), root.join(COPY));
    let files = files(root, "*")?;
    update(&files, root, &new)?;
    let model = new.join("model/src/lib.rs");
    fs::write(&model, fs::read_to_string(&model)? + FUNCTION)?;
    faults
        .iter()
        .try_for_each(|fault| fault.apply(root, &format!("--directory={NEW}")))?;
    update(&files, &new, &copy)?;
    let mut command = cargo()?;
    command.current_dir(copy).env("CARGO_TARGET_DIR", root.join(TARGET));
    command
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .args(["test", "--lib", "--bins", "--tests"]);
    command.args(CRATES.split(' ').map(|name| format!("--package={name}")));
    Ok(compile(&mut command)?.tests)
}

/// Copies files that differ.
fn update(files: &str, from: &Path, to: &Path) -> Result<()> {
    for file in files.lines().filter(|file| from.join(file).is_file()) {
        let (content, to) = (fs::read(from.join(file))?, to.join(file));
        if fs::read(&to).ok().as_ref() != Some(&content) {
            fs::create_dir_all(to.parent().unwrap_or(&to))?;
            fs::write(&to, content).with_context(|| format!("cannot write {file}"))?;
        }
    }
    Ok(())
}

/// Runs test programs with a fault until one fails: the kinds in their order, and tests of the fault's crate before
/// others. Returns which one, and how. Fault 0 is none.
fn first_to_fail(
    programs: &[TestProgram],
    fault: &Fault,
    thorough: bool,
) -> Result<Option<(String, String)>> {
    let file = root()?.join(COPY).join(&fault.file);
    let folders = programs.iter().map(|program| &program.folder);
    let own = folders
        .filter(|folder| file.starts_with(folder))
        .max_by_key(|folder| folder.as_os_str().len());
    let is_own = |program: &TestProgram| own.is_none_or(|own| *own == program.folder);
    let kinds = |program: &TestProgram| match &*program.target {
        "simulation" => &[0, 2][..],
        "it" | "kernel" | "relay" => &[4],
        _ if is_own(program) => &[1],
        _ => &[3],
    };
    let mut chosen: Vec<(usize, &TestProgram)> = programs
        .iter()
        .flat_map(|program| kinds(program).iter().map(move |kind| (*kind, program)))
        .filter(|(kind, _)| thorough || *kind < QUICK)
        .collect();
    chosen.sort_by_key(|(kind, program)| (*kind, !is_own(program)));
    for (kind, program) in chosen {
        let mut args: Vec<String> = KINDS[kind].1.iter().map(ToString::to_string).collect();
        while let Some(how) = failure(program, &args, fault)? {
            let suite = format!("{} of {}", KINDS[kind].0, program.package);
            // A seed and the end of a program are no names of tests.
            if how.contains(' ') {
                return Ok(Some((suite, how)));
            }
            // What fails beside others and not alone has too little of the machine.
            let alone = ["--exact", &how].map(ToOwned::to_owned);
            if failure(program, &alone, fault)?.is_some() {
                return Ok(Some((suite, format!("`{how}`"))));
            }
            args.extend(["--skip".to_owned(), how]);
        }
    }
    Ok(None)
}

/// Runs a test program with a fault until a test fails. Returns the name of the test, the seed, or the program's end.
fn failure(program: &TestProgram, args: &[String], fault: &Fault) -> Result<Option<String>> {
    let mut command = Command::new("timeout");
    command
        .arg(PATIENCE)
        .args(["setpriv", "--pdeathsig", "KILL"])
        .arg(&program.executable)
        .args(args);
    command.current_dir(&program.folder).env("CARGO_MANIFEST_DIR", &program.folder);
    command.env("KPLANE_PROGRAMS", root()?.join(TARGET).join("debug"));
    command.env("KPLANE_FAULT", fault.number.to_string()).stderr(Stdio::null());
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let said = BufReader::new(child.stdout.take().context("a test has no output")?);
    let failed = said.lines().map_while(Result::ok).find_map(|line| {
        let test = line.strip_prefix("test ").and_then(|line| line.strip_suffix(" ... FAILED"));
        let seed = line.starts_with("seed ").then_some(&*line);
        test.or(seed).map(ToOwned::to_owned)
    });
    if failed.is_some() {
        // The other tests are of no interest.
        child.kill()?;
    }
    let status = child.wait()?;
    Ok(failed.or_else(|| (!status.success()).then(|| status.to_string())))
}
