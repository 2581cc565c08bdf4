//! Reads values of any field, and names every wrong one (I7).

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use kplane_kube_proxy_config::{GoDuration, Problem};
use kplane_model::Cidr;

/// Reads values and records what is wrong with them. A value that it returns after a problem is
/// useless.
#[derive(Debug, Default)]
pub(super) struct Checker {
    pub(super) problems: Vec<Problem>,
}

impl Checker {
    pub(super) fn bad(&mut self, field: &str, value: impl fmt::Display, reason: &str) {
        self.problems.push(Problem::new(field, value, reason));
    }

    pub(super) fn cidr(&mut self, field: &str, text: &str) -> Option<Cidr> {
        let cidr = text.parse().ok();
        if cidr.is_none() {
            let reason = "must be an address range such as 10.0.0.0/8 or fd00::/8";
            self.bad(field, text, reason);
        }
        cidr
    }

    pub(super) fn address(&mut self, field: &str, text: &str) -> Option<SocketAddr> {
        let address = kplane_kube_proxy_config::parse_address(text);
        if address.is_none() && !text.is_empty() {
            let reason = "must be IP:port such as 0.0.0.0:10256 or [::]:10256";
            self.bad(field, text, reason);
        }
        address
    }

    /// Reads a timeout; 0 keeps the kernel's value.
    pub(super) fn timeout(&mut self, field: &str, value: GoDuration) -> Duration {
        if value.is_negative() {
            self.bad(field, value, "must be at least 0");
        }
        value.to_std().unwrap_or_default()
    }

    pub(super) fn positive(&mut self, field: &str, value: GoDuration) {
        if value <= GoDuration::ZERO {
            self.bad(field, value, "must be greater than 0");
        }
    }

    pub(super) fn in_range(&mut self, field: &str, value: i32, least: i32, most: i32) -> i32 {
        if !(least..=most).contains(&value) {
            let reason = match most {
                i32::MAX => format!("must be at least {least}"),
                _ => format!("must be from {least} to {most}"),
            };
            self.bad(field, value, &reason);
        }
        value
    }
}
