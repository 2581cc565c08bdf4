//! Bills of materials (CycloneDX 1.6). They name no time and no serial number: equal contents give equal bytes.

use anyhow::Result;
use serde_json::{Value, json};

use super::debian::Package;
use super::packages::Crates;

/// Returns the bill of materials of a program and of the Debian packages beside it.
///
/// # Errors
/// It cannot be written as JSON.
pub(super) fn of_program(crates: &Crates, packages: &[Package]) -> Result<Vec<u8>> {
    let mut components = crates.components();
    components.extend(packages.iter().map(Package::component));
    write(&json!({
        "metadata": { "component": crates.program() },
        "components": components,
        "dependencies": crates.dependencies(),
    }))
}

/// Returns the bill of materials of Debian packages.
///
/// # Errors
/// It cannot be written as JSON.
pub(super) fn of_packages(packages: &[Package]) -> Result<Vec<u8>> {
    let components: Vec<Value> = packages.iter().map(Package::component).collect();
    write(&json!({ "components": components }))
}

fn write(content: &Value) -> Result<Vec<u8>> {
    let mut bill = json!({ "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1 });
    for (key, value) in content.as_object().into_iter().flatten() {
        bill[key] = value.clone();
    }
    let mut bytes = serde_json::to_vec_pretty(&bill)?;
    bytes.push(b'\n');
    Ok(bytes)
}
