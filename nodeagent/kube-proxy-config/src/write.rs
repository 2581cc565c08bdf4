//! Writes a configuration as YAML, in the order in which kube-proxy writes it: by name.

use std::path::Path;

use anyhow::Context;

use crate::types::KubeProxyConfiguration;

/// Returns the YAML of a configuration. Reading it returns the same configuration.
///
/// # Errors
/// None in practice: every field can be written.
pub fn to_yaml(config: &KubeProxyConfiguration) -> anyhow::Result<String> {
    // Mappings of a `Value` are sorted by name; those of structs are not.
    let value = serde_json::to_value(config)?;
    Ok(serde_saphyr::to_string(&value)?)
}

/// Replaces a file with the YAML.
///
/// # Errors
/// The file system's error, with the path.
pub fn to_file(config: &KubeProxyConfiguration, path: &Path) -> anyhow::Result<()> {
    let yaml = to_yaml(config)?;
    std::fs::write(path, yaml)
        .with_context(|| format!("--write-config-to {}: cannot be written", path.display()))
}

#[cfg(test)]
mod tests;
