//! Compiles the .proto files with a pure-Rust compiler: no system `protoc` is needed.

use std::error::Error;
use std::path::PathBuf;

use prost::Message;
use tonic_build::manual;

const FILES: [&str; 5] = [
    "kplane/v1/objects.proto",
    "kplane/v1/report.proto",
    "kplane/v1/agent.proto",
    "kplane/v1/status.proto",
    "kplane/v1/desired.proto",
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
    shared_agent_server();
    Ok(())
}

/// Generates a second server for `AgentService` whose answers are already encoded: objects are
/// encoded once, not once per agent.
fn shared_agent_server() {
    let sync = manual::Method::builder()
        .name("sync")
        .route_name("Sync")
        .input_type("crate::v1::AgentMessage")
        .output_type("bytes::Bytes")
        .codec_path("crate::shared::SharedCodec")
        .client_streaming()
        .server_streaming()
        .build();
    let service = manual::Service::builder()
        .name("AgentService")
        .package("kplane.v1")
        .method(sync)
        .build();
    manual::Builder::new()
        .build_client(false)
        .compile(&[service]);
}
