//! Compiles the .proto files with a pure-Rust compiler: no system `protoc` is needed.

use std::error::Error;
use std::path::PathBuf;

use prost::Message;
use protox::prost_reflect::DescriptorPool;

const FILES: [&str; 8] = [
    "kplane/v1/options.proto",
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
    let mut compiler = protox::Compiler::new(["proto"])?;
    compiler.include_imports(true).include_source_info(true).open_files(FILES)?;
    let descriptors = compiler.file_descriptor_set();
    // gRPC reflection serves these descriptors.
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    std::fs::write(
        out.join("declared.bin"),
        compiler.encode_file_descriptor_set(),
    )?;
    std::fs::write(out.join("rights.rs"), rights(&compiler.descriptor_pool())?)?;
    tonic_prost_build::configure()
        .bytes(".kplane.v1.Update")
        .bytes(".kplane.v1.ServiceProgram")
        .bytes(".kplane.v1.LocalEndpoints")
        .skip_debug([".kplane.v1.Renewal"])
        .compile_fds(descriptors)?;
    Ok(())
}

/// Returns the number of the right of each method, by the method's path, as the arms of a match.
fn rights(pool: &DescriptorPool) -> Result<String, Box<dyn Error>> {
    let option = pool.get_extension_by_name("kplane.v1.right").ok_or("no option `right`")?;
    let mut arms = String::new();
    for method in pool.services().flat_map(|service| service.methods().collect::<Vec<_>>()) {
        let path = format!("/{}/{}", method.parent_service().full_name(), method.name());
        match method.options().get_extension(&option).as_enum_number() {
            Some(right) if right > 0 => arms.push_str(&format!("{path:?} => {right},")),
            _ => return Err(format!("rpc {path} declares no `option (right)`").into()),
        }
    }
    Ok(format!("match path {{ {arms} _ => 0 }}"))
}
