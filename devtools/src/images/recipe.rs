//! What is in each image.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use anyhow::{Context as _, Result};
use flate2::Compression;
use kplane_rig::oci::{self, EXECUTABLE, Image, Layer, Packed, READABLE};
use kplane_rig::process::output;
use serde_json::json;

use super::debian::{Collection, Package};
use super::packages::Crates;
use super::program::Program;
use super::sbom;

/// The place of kplane's images.
const REGISTRY: &str = "ghcr.io/kplane";
/// The version of all programs.
pub(super) const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The folder of the program in an image.
const BIN: &str = "usr/local/bin";
/// Folders that are searched for programs.
const PATH: &str = "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// The folder of bills of materials in an image.
const SBOM: &str = "usr/share/sbom";

/// Where glibc looks for hosts: in the file that kubelet mounts, and in DNS. A static program has no other ways.
const NSSWITCH: &str = "hosts: files dns\n";
const PASSWD: &str = "root:x:0:0:root:/:/\nnonroot:x:65532:65532:nonroot:/:/\n";
const GROUP: &str = "root:x:0:\nnonroot:x:65532:\n";

/// A program and its image.
pub(super) struct Recipe {
    pub(super) program: &'static str,
    title: &'static str,
    /// The user and group of the program. The agent is root, without root's other rights where the pod says so: the
    /// program of a container gets capabilities only as root.
    user: &'static str,
    /// Whether a second image has iptables.
    pub(super) with_iptables: bool,
}

/// All images.
pub(super) const RECIPES: [Recipe; 2] = [
    Recipe {
        program: "kp-controlplane",
        title: "kplane's control plane: reads Services once and streams every node's desired state",
        user: "65532:65532",
        with_iptables: false,
    },
    // Without the control plane of `--standalone`, which is more than half of the program: agents in a cluster ask one. The
    // images of `--quick` have it, since their programs are those of the tests.
    Recipe {
        program: "kp-nodeagent",
        title: "kplane's node agent: programs Services into a node's kernel",
        user: "0:0",
        with_iptables: true,
    },
];

/// The state of the sources.
pub(super) struct Commit {
    revision: String,
    /// RFC 3339.
    time: String,
}

impl Commit {
    /// Returns the commit of this checkout. Sources without git get neither a time nor a name.
    pub(super) fn of_checkout() -> Self {
        let git = |args: &[&str]| {
            let mut git = Command::new("git");
            git.current_dir(crate::workspace()).env("TZ", "UTC");
            let text = output(git.args(args)).ok()?;
            Some(text.trim().to_owned())
        };
        let format = ["log", "-1", "--date=format-local:%Y-%m-%dT%H:%M:%SZ"];
        let time = git(&[&format[..], &["--format=%cd"]].concat());
        let changed = git(&["status", "--porcelain"]).is_some_and(|text| !text.is_empty());
        let revision = git(&["rev-parse", "HEAD"]).unwrap_or_else(|| "unknown".to_owned());
        Self {
            revision: revision + if changed { "-dirty" } else { "" },
            time: time.unwrap_or_else(|| "1970-01-01T00:00:00Z".to_owned()),
        }
    }
}

/// The content of a program's images.
pub(super) struct Content<'a> {
    recipe: &'a Recipe,
    architecture: &'static str,
    commit: &'a Commit,
    crates: &'a Crates,
    level: Compression,
    libraries: Collection,
    /// The layer with the program, which all its images share.
    layer: Packed,
}

impl<'a> Content<'a> {
    /// Collects what is in the images of a program.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(super) fn new(
        (recipe, program): (&'a Recipe, &Program),
        architecture: &'static str,
        commit: &'a Commit,
        crates: &'a Crates,
        level: Compression,
    ) -> Result<Self> {
        let mut libraries = Collection::default();
        libraries.add_libraries(program.path())?;
        let layer = program_layer(recipe.program, program, crates)?.pack(level)?;
        Ok(Self {
            recipe,
            architecture,
            commit,
            crates,
            level,
            libraries,
            layer,
        })
    }

    /// Returns an image, with these programs of Debian beside the program, and its bill of materials.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(super) fn image(&self, tools: Option<&Collection>) -> Result<(Image, Vec<u8>)> {
        let mut packages = self.libraries.packages();
        packages.extend(tools.iter().flat_map(|tools| tools.packages()));
        packages.sort();
        packages.dedup();
        let mut layers = vec![base()];
        if let Some(tools) = tools {
            layers.push(with_bill("iptables", tools)?);
        }
        if !self.libraries.packages().is_empty() {
            layers.push(with_bill("libraries", &self.libraries)?);
        }
        let packed = layers.iter().map(|layer| layer.pack(self.level));
        let mut layers: Vec<Packed> = packed.collect::<Result<_>>()?;
        layers.push(self.layer.clone());
        let tag = match tools {
            Some(_) => format!("{VERSION}-iptables"),
            None => VERSION.to_owned(),
        };
        let Recipe { program, user, .. } = self.recipe;
        let labels = self.labels(&tag);
        let image = Image {
            name: format!("{REGISTRY}/{program}:{tag}"),
            architecture: self.architecture,
            container: json!({
                "User": user,
                "Env": [PATH],
                "Entrypoint": [format!("/{BIN}/{program}")],
                "WorkingDir": "/",
                "Labels": labels,
            }),
            annotations: labels,
            created: self.commit.time.clone(),
            layers,
        };
        Ok((image, sbom::of_program(self.crates, &packages)?))
    }

    fn labels(&self, tag: &str) -> BTreeMap<&'static str, String> {
        let repository = env!("CARGO_PKG_REPOSITORY");
        let labels = [
            ("org.opencontainers.image.title", self.recipe.program),
            ("org.opencontainers.image.description", self.recipe.title),
            ("org.opencontainers.image.version", tag),
            ("org.opencontainers.image.revision", &self.commit.revision),
            ("org.opencontainers.image.created", &self.commit.time),
            ("org.opencontainers.image.source", repository),
            (
                "org.opencontainers.image.licenses",
                env!("CARGO_PKG_LICENSE"),
            ),
        ];
        labels.map(|(key, text)| (key, text.to_owned())).into()
    }
}

/// Returns the layer with a program, its licence and its bill of materials.
fn program_layer(name: &str, program: &Program, crates: &Crates) -> Result<Layer> {
    let mut layer = Layer::default();
    layer.copy(&format!("{BIN}/{name}"), EXECUTABLE, program.path());
    let bill = sbom::of_program(crates, &[])?;
    layer.file(&format!("{SBOM}/{name}.cdx.json"), READABLE, bill);
    let licence = crate::workspace().join("LICENSE");
    layer.copy(&format!("usr/share/doc/{name}/LICENSE"), READABLE, &licence);
    Ok(layer)
}

/// Returns the files that every image has.
fn base() -> Layer {
    let mut layer = Layer::default();
    layer.file("etc/nsswitch.conf", READABLE, NSSWITCH);
    layer.file("etc/passwd", READABLE, PASSWD);
    layer.file("etc/group", READABLE, GROUP);
    layer
}

/// Returns the layer of a collection, with its bill of materials.
fn with_bill(name: &str, collection: &Collection) -> Result<Layer> {
    let packages: Vec<Package> = collection.packages();
    let mut layer = collection.layer.clone();
    let bill = sbom::of_packages(&packages)?;
    layer.file(&format!("{SBOM}/{name}.cdx.json"), READABLE, bill);
    Ok(layer)
}

/// Returns how images name the architecture of a target.
///
/// # Errors
/// kplane has no images for it.
pub(super) fn architecture(target: &str) -> Result<&'static str> {
    let known = target.split('-').next().and_then(oci::architecture);
    known.with_context(|| format!("there are no images for {target}: x86_64 and aarch64 have some"))
}

/// Writes the files of an image into a folder, lowest layer first.
///
/// # Errors
/// The folder is not writable.
pub(super) fn unpack(image: &Image, folder: &std::path::Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    for layer in &image.layers {
        let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(&*layer.bytes));
        archive.set_preserve_permissions(true);
        archive
            .unpack(folder)
            .with_context(|| format!("cannot write into {}", folder.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing here runs podman or docker, so at least what decides on rights is compared.
    #[test]
    fn the_containerfile_makes_the_same_images() {
        let file = crate::workspace().join("deploy/Containerfile");
        let text = fs::read_to_string(file).unwrap();
        let stages: Vec<String> = text.split("\nFROM ").map(|stage| format!("{stage}\n")).collect();
        let stage = |name: &str| {
            let first = format!("scratch AS {name}\n");
            stages.iter().find(|stage| stage.starts_with(&first))
        };
        for recipe in RECIPES {
            let Recipe { program, user, .. } = recipe;
            let mut names = vec![program.to_owned()];
            names.extend(recipe.with_iptables.then(|| format!("{program}-iptables")));
            for name in names {
                let stage = stage(&name).unwrap_or_else(|| panic!("no stage {name}"));
                for line in [
                    format!("COPY --from=build /roots/{name}/ /\n"),
                    format!("USER {user}\n"),
                    format!("ENTRYPOINT [\"/{BIN}/{program}\"]\n"),
                ] {
                    assert!(stage.contains(&line), "{name} lacks {line}");
                }
            }
        }
    }
}
