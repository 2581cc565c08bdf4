//! Compiles the .proto files with a pure-Rust compiler: no system `protoc` is needed.

use std::error::Error;
use std::path::PathBuf;

use prost::Message;

const FILES: [&str; 7] = [
    "kplane/v1/objects.proto",
    "kplane/v1/report.proto",
    "kplane/v1/agent.proto",
    "kplane/v1/status.proto",
    "kplane/v1/desired.proto",
    "kplane/v1/peer.proto",
    "kplane/v1/recorder.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    let descriptors = protox::compile(FILES, ["proto"])?;
    // gRPC reflection serves these descriptors.
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .bytes(".kplane.v1.Update")
        .bytes(".kplane.v1.ServiceProgram")
        .bytes(".kplane.v1.LocalEndpoints")
        .skip_debug([".kplane.v1.Renewal"])
        .compile_fds(descriptors)?;
    Ok(())
}
