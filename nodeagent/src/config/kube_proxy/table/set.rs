//! Functions that write the text of a flag into a field.

use kplane_kube_proxy_config::{
    EXPECTED_DURATION, GoDuration, KubeProxyConfiguration, Quantity, Vmodule,
};

type Read = Result<(), &'static str>;

fn put<T>(field: &mut T, value: Option<T>, expected: &'static str) -> Read {
    *field = value.ok_or(expected)?;
    Ok(())
}

pub(super) fn text(field: &mut String, value: &str) -> Read {
    value.clone_into(field);
    Ok(())
}

pub(super) fn number(field: &mut i32, value: &str) -> Read {
    put(field, value.parse().ok(), "a whole number")
}

pub(super) fn decimal(field: &mut f64, value: &str) -> Read {
    let value = value.parse().ok().filter(|v: &f64| v.is_finite());
    put(field, value, "a number")
}

pub(super) fn period(field: &mut GoDuration, value: &str) -> Read {
    put(field, value.parse().ok(), EXPECTED_DURATION)
}

pub(super) fn quantity(field: &mut Quantity, value: &str) -> Read {
    put(field, Quantity::parse(value), "a quantity such as 128Ki")
}

/// Reads a truth value as Go's flags do.
pub(crate) fn truth(value: &str) -> Option<bool> {
    match value {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}

pub(super) fn switch(field: &mut bool, value: &str) -> Read {
    put(field, truth(value), "true or false")
}

fn items(value: &str) -> impl Iterator<Item = &str> {
    value.split(',').filter(|item| !item.is_empty())
}

pub(super) fn list(field: &mut Vec<String>, value: &str) -> Read {
    *field = items(value).map(str::to_owned).collect();
    Ok(())
}

/// Reads a verbosity: a level, or, after `-v`, nothing or more letters `v`.
pub(super) fn verbosity(field: &mut u32, value: &str) -> Read {
    let level = match value {
        "" => Some(4),
        letters if letters.bytes().all(|b| b == b'v') => Some(6),
        level => level.parse().ok(),
    };
    put(field, level, "a level such as 2, or nothing")
}

pub(super) fn feature_gates(config: &mut KubeProxyConfiguration, value: &str) -> Read {
    let expected = "gates such as SomeGate=true,Other=false";
    for item in items(value) {
        let (authenticator, on) = item.split_once('=').ok_or(expected)?;
        let on = truth(on.trim()).ok_or(expected)?;
        config.feature_gates.insert(authenticator.trim().to_owned(), on);
    }
    Ok(())
}

pub(super) fn vmodule(config: &mut KubeProxyConfiguration, value: &str) -> Read {
    let expected = "files and levels such as proxier=4,sync=6";
    let parse = |item: &str| {
        let (pattern, level) = item.split_once('=').ok_or(expected)?;
        Ok(Vmodule {
            file_pattern: pattern.to_owned(),
            verbosity: level.parse().map_err(|_| expected)?,
        })
    };
    config.logging.vmodule = items(value).map(parse).collect::<Result<_, &str>>()?;
    Ok(())
}
