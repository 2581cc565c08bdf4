//! Images as archives with an OCI layout (image-spec 1.1), which `ctr images import`, `podman load`, `docker load`
//! and `skopeo copy oci-archive:` read.

mod digest;
mod layer;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use serde_json::{Value, json};

pub use self::digest::Digest;
pub use self::layer::{EXECUTABLE, Layer, Packed, READABLE};

use self::layer::Archive;
use crate::process::output;

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
/// The annotation from which containerd takes the name of an imported image.
const NAME: &str = "io.containerd.image.name";
/// The annotation of the OCI layout for a tag.
const TAG: &str = "org.opencontainers.image.ref.name";

/// An image of one architecture, to be written.
#[derive(Debug)]
pub struct Image {
    /// The full name, such as `ghcr.io/kplane/kp-nodeagent:0.1.0`.
    pub name: String,
    /// The architecture as images name it, such as `amd64`.
    pub architecture: &'static str,
    /// What a container runs, and how (`config` of the image's configuration).
    pub container: Value,
    /// Annotations of the manifest.
    pub annotations: BTreeMap<&'static str, String>,
    /// The time of the image (RFC 3339).
    pub created: String,
    /// The layers, the lowest first.
    pub layers: Vec<Packed>,
}

impl Image {
    /// Returns the number of bytes that a node downloads to run the image.
    pub fn pulled(&self) -> usize {
        self.layers.iter().map(|layer| layer.bytes.len()).sum()
    }

    /// Returns the size of all files, in bytes.
    pub fn unpacked(&self) -> usize {
        self.layers.iter().map(|layer| layer.unpacked).sum()
    }

    /// Returns the image's configuration.
    fn config(&self) -> Value {
        let diff_ids = self.layers.iter().map(|layer| layer.diff_id.to_string());
        json!({
            "created": self.created,
            "architecture": self.architecture,
            "os": "linux",
            "config": self.container,
            "rootfs": { "type": "layers", "diff_ids": Vec::from_iter(diff_ids) },
            "history": self.layers.iter().map(|_| json!({ "created": self.created, "created_by": "cargo xtask images" }))
                .collect::<Vec<_>>(),
        })
    }

    /// Returns the archive's bytes and the digest of the image. Equal images give equal bytes.
    ///
    /// # Errors
    /// The archive cannot be made.
    pub fn archive(&self) -> Result<(Vec<u8>, Digest)> {
        let mut blobs = Blobs::default();
        let layers: Vec<Value> = self
            .layers
            .iter()
            .map(|layer| blobs.add(layer.media_type, layer.bytes.clone()))
            .collect();
        let config = blobs.add(CONFIG, serde_json::to_vec(&self.config())?);
        let manifest = serde_json::to_vec(&json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": config,
            "layers": layers,
            "annotations": self.annotations,
        }))?;
        let digest = Digest::of(&manifest);
        let mut manifest = blobs.add(MANIFEST, manifest);
        let tag = self.name.rsplit(':').next().unwrap_or_default();
        manifest["annotations"] = json!({ NAME: self.name, TAG: tag });
        manifest["platform"] = json!({ "architecture": self.architecture, "os": "linux" });
        let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [manifest] });
        let mut archive = Archive::default();
        let text = |value: &Value| serde_json::to_vec(value);
        let version = json!({ "imageLayoutVersion": "1.0.0" });
        archive.file("oci-layout", READABLE, &text(&version)?)?;
        archive.file("index.json", READABLE, &text(&index)?)?;
        let older = self.for_older_dockers(&config, &layers);
        archive.file("manifest.json", READABLE, &text(&older)?)?;
        archive.folder("blobs", EXECUTABLE)?;
        archive.folder("blobs/sha256", EXECUTABLE)?;
        for (name, blob) in &blobs.0 {
            archive.file(&format!("blobs/sha256/{name}"), READABLE, blob)?;
        }
        Ok((archive.finish()?, digest))
    }

    /// Returns the list of images that `docker load` reads before version 25.
    fn for_older_dockers(&self, config: &Value, layers: &[Value]) -> Value {
        let path = |blob: &Value| {
            let digest = blob["digest"].as_str().unwrap_or_default();
            format!("blobs/{}", digest.replace(':', "/"))
        };
        let layers: Vec<String> = layers.iter().map(path).collect();
        json!([{ "Config": path(config), "RepoTags": [self.name], "Layers": layers }])
    }
}

/// Contents by the digits of their digest.
#[derive(Debug, Default)]
struct Blobs(BTreeMap<String, Vec<u8>>);

impl Blobs {
    /// Adds a content, and returns its descriptor.
    fn add(&mut self, media_type: &str, content: Vec<u8>) -> Value {
        let digest = Digest::of(&content);
        let size = content.len();
        self.0.insert(digest.hex().to_owned(), content);
        json!({ "mediaType": media_type, "digest": digest.to_string(), "size": size })
    }
}

/// Returns how images name an architecture of Rust's targets; `None` if the rig does not know it.
pub fn architecture(name: &str) -> Option<&'static str> {
    match name {
        "x86_64" => Some("amd64"),
        "aarch64" => Some("arm64"),
        _ => None,
    }
}

/// Returns the libraries of a program, and the program that loads them; none for a static program.
pub fn libraries(program: &Path) -> Vec<PathBuf> {
    let mut ldd = Command::new("ldd");
    ldd.arg(program);
    // ldd fails for a static program.
    let text = output(ldd).unwrap_or_default();
    text.lines()
        .filter_map(|line| {
            let (path, _) = line.split_once(" (0x")?;
            path.split_whitespace().next_back()
        })
        .filter(|word| word.starts_with('/'))
        .map(PathBuf::from)
        .collect()
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::Compression;

    use super::*;

    fn image() -> Image {
        let mut layer = Layer::default();
        layer.file("kp", EXECUTABLE, "program");
        Image {
            name: "example.org/kp:1".to_owned(),
            architecture: "amd64",
            container: json!({ "Entrypoint": ["/kp"], "User": "65532:65532" }),
            annotations: BTreeMap::from([("org.opencontainers.image.title", "kp".to_owned())]),
            created: "1970-01-01T00:00:00Z".to_owned(),
            layers: vec![layer.pack(Compression::best()).unwrap()],
        }
    }

    #[test]
    fn an_image_written_twice_has_the_same_bytes() {
        let (one, digest) = image().archive().unwrap();
        assert_eq!((one, digest), image().archive().unwrap());
    }

    /// Follows the digests from the index to the layer.
    #[test]
    fn every_digest_of_the_layout_names_its_content() {
        let (bytes, digest) = image().archive().unwrap();
        let mut files = BTreeMap::new();
        for entry in tar::Archive::new(&*bytes).entries().unwrap() {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().display().to_string();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            files.insert(path, content);
        }
        let blob = |descriptor: &Value| {
            let name = descriptor["digest"].as_str().unwrap().replace(':', "/");
            let content = &files[&format!("blobs/{name}")];
            assert_eq!(descriptor["digest"], Digest::of(content).to_string());
            assert_eq!(descriptor["size"], content.len());
            content
        };
        let json = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
        let index = json(&files["index.json"]);
        assert_eq!(index["manifests"][0]["digest"], digest.to_string());
        let manifest = json(blob(&index["manifests"][0]));
        let config = json(blob(&manifest["config"]));
        assert_eq!(config["config"]["User"], "65532:65532");
        blob(&manifest["layers"][0]);
        let older = json(&files["manifest.json"]);
        assert!(files.contains_key(older[0]["Config"].as_str().unwrap()));
        assert!(files.contains_key(older[0]["Layers"][0].as_str().unwrap()));
    }
}
