//! `cargo xtask clients`: a Python package and a Go module with kplane's API, for programs of other projects. Everything
//! in them is generated from the `.proto` files by tools in fixed versions, so that two runs write the same bytes.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail};

use crate::cargo::{output, root, status};
use crate::tool::folder;

const HELP: &str = "\
Generate a Python package and a Go module with the API of the control plane

Usage: cargo xtask clients [--out DIR]

Options:
  --out DIR  Write them into DIR/python and DIR/go [default: target/clients]

It needs Python (3.9 or newer, with venv) and Go (1.25 or newer). docs/tools.md explains how to use the packages.
";

/// The Python package that has protoc and its plugin for Python. `PYPROJECT` asks for a runtime that is not older.
const GRPCIO_TOOLS: (&str, &str) = ("grpcio-tools", "1.76.0");
/// Plugins of protoc for Go: name, version, and the path before the name. `GO_MOD` asks for a runtime that fits.
const PLUGINS: [(&str, &str, &str); 2] = [
    ("protoc-gen-go", "1.36.12", "google.golang.org/protobuf/cmd"),
    ("protoc-gen-go-grpc", "1.6.2", "google.golang.org/grpc/cmd"),
];
/// The file that only replicas of the control plane use among each other.
const INTERNAL: &str = "peer.proto";

/// The files of both packages that no compiler generates. Each `VERSION` in them becomes kplane's.
const FILES: [(&str, &str); 9] = [
    ("python/pyproject.toml", PYPROJECT),
    ("python/README.md", README),
    ("python/LICENSE", LICENSE),
    ("python/kplane_api/__init__.py", INIT_PY),
    ("python/kplane_api/py.typed", ""),
    ("python/kplane_api/v1/__init__.py", ""),
    ("go/go.mod", GO_MOD),
    ("go/LICENSE", LICENSE),
    ("go/kplanev1/doc.go", DOC_GO),
];
const LICENSE: &str = include_str!("../../LICENSE");
/// The path of the Go module, as in `GO_MOD`.
const MODULE: &str = "github.com/kplane/kplane/api";
const GO_MOD: &str = "\
module github.com/kplane/kplane/api

go 1.25.0

require (
	google.golang.org/grpc v1.81.0
	google.golang.org/protobuf v1.36.12
)

require (
	golang.org/x/net v0.51.0 // indirect
	golang.org/x/sys v0.42.0 // indirect
	golang.org/x/text v0.34.0 // indirect
	google.golang.org/genproto/googleapis/rpc v0.0.0-20260226221140-a57be14db171 // indirect
)
";
const DOC_GO: &str = r#"// Package kplanev1 is the API of kplane's control plane, generated from kplane's .proto files by `cargo xtask clients`.
//
// https://github.com/kplane/kplane/blob/main/docs/tools.md explains how to connect, and what a client can rely on.
package kplanev1

// Version is the version of kplane whose API this is.
const Version = "VERSION"
"#;
const PYPROJECT: &str = r#"[build-system]
requires = ["flit_core>=3.11,<5"]
build-backend = "flit_core.buildapi"

[project]
name = "kplane-api"
version = "VERSION"
description = "API of kplane's control plane: messages and gRPC stubs"
readme = "README.md"
requires-python = ">=3.9"
license = "Apache-2.0"
license-files = ["LICENSE"]
dependencies = ["grpcio>=1.76.0,<2", "protobuf>=6.31.1,<8"]

[tool.flit.module]
name = "kplane_api"
"#;
const INIT_PY: &str = r#""""API of kplane's control plane: messages and gRPC stubs, in kplane_api.v1."""

__version__ = "VERSION"
"#;
const README: &str = r#"# kplane_api

The API of kplane's control plane, version VERSION: messages and gRPC stubs, generated from kplane's .proto files by
`cargo xtask clients`. Install the package with `pip install FOLDER`, and use it so:

    import grpc
    from kplane_api.v1 import desired_pb2, desired_pb2_grpc

    channel = grpc.insecure_channel("127.0.0.1:7466")
    stub = desired_pb2_grpc.DesiredStateServiceStub(channel)
    for state in stub.WatchNode(desired_pb2.WatchNodeRequest(node_name="node-1")):
        print(state)

[tools.md](https://github.com/kplane/kplane/blob/main/docs/tools.md) explains how to connect with certificates and
tokens, and what a client can rely on.
"#;

/// Generates both packages.
pub(crate) fn run(args: &[String]) -> Result<ExitCode> {
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let out = match words[..] {
        ["--help" | "-h", ..] => {
            print!("{HELP}");
            return Ok(ExitCode::SUCCESS);
        }
        [] => root()?.join("target/clients"),
        ["--out", folder] => PathBuf::from(folder),
        _ => bail!("{}: see `cargo xtask clients --help`", words.join(" ")),
    };
    generate(&out.join("python/kplane_api"), &out.join("go"))?;
    for (file, text) in FILES {
        let text = text.replace("VERSION", env!("CARGO_PKG_VERSION"));
        write(&out.join(file), &text)?;
    }
    println!("{0}/python and {0}/go are written", out.display());
    Ok(ExitCode::SUCCESS)
}

/// Generates the code of the Python package and of the Go module.
fn generate(package: &Path, module: &Path) -> Result<()> {
    let mut protoc = protoc()?;
    empty(package)?;
    empty(&module.join("kplanev1"))?;
    let protos = protos()?;
    for kind in ["python", "pyi", "grpc_python"] {
        protoc.arg(format!("--{kind}_out={}", package.display()));
    }
    let places: String = protos.iter().map(|file| format!("M{file}={MODULE}/kplanev1,")).collect();
    for kind in ["go", "go-grpc"] {
        let out = module.display();
        protoc.arg(format!("--{kind}_out={places}module={MODULE}:{out}"));
    }
    protoc.arg("-I").arg(root()?.join("proto/proto"));
    status(protoc.args(protos))?;
    let code = package.join("v1");
    fs::rename(package.join("kplane/v1"), &code)?;
    fs::remove_dir(package.join("kplane"))?;
    for entry in fs::read_dir(&code)? {
        let file = entry?.path();
        // The compiler takes the folders of .proto files for packages at the top.
        let text = fs::read_to_string(&file)?.replace("from kplane.v1 import ", "from . import ");
        write(&file, &text)?;
    }
    Ok(())
}

/// Prepares the compiler of `.proto` files with its plugins. It installs what is missing, outside of the checkout.
fn protoc() -> Result<Command> {
    let (name, version) = GRPCIO_TOOLS;
    let venv = folder(name, version)?;
    let protoc = || {
        let mut command = Command::new(venv.join("bin/python"));
        command.args(["-m", "grpc_tools.protoc"]);
        command
    };
    if output(protoc().arg("--version")).is_err() {
        println!("installing {name} {version}, once");
        let mut create = Command::new("python3");
        status(create.args(["-m", "venv", "--clear"]).arg(&venv))
            .context("install Python 3.9 or newer with venv (Debian: python3-venv)")?;
        let mut pip = Command::new(venv.join("bin/pip"));
        pip.args(["install", "--quiet", &format!("{name}=={version}")]);
        status(&mut pip).context("pip must reach a package index")?;
    }
    let mut command = protoc();
    for (name, version, packages) in PLUGINS {
        let folder = folder(name, version)?.join("bin");
        let program = folder.join(name);
        if !program.exists() {
            println!("building {name} {version}, once");
            let package = format!("{packages}/{name}@v{version}");
            let mut go = Command::new("go");
            status(go.args(["install", &package]).env("GOBIN", folder))
                .context("install Go 1.25 or newer, which must reach a module proxy")?;
        }
        command.arg(format!("--plugin={}", program.display()));
    }
    Ok(command)
}

/// Returns the files of the API by their names in imports, sorted.
fn protos() -> Result<Vec<String>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(root()?.join("proto/proto/kplane/v1"))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".proto") && name != INTERNAL {
            files.push(format!("kplane/v1/{name}"));
        }
    }
    files.sort();
    Ok(files)
}

/// Makes a folder for generated code, without the code of an earlier run.
fn empty(folder: &Path) -> Result<()> {
    if folder.exists() {
        let removed = fs::remove_dir_all(folder);
        removed.with_context(|| format!("cannot remove the old {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
