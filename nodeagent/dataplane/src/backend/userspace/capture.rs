//! The rules that lead clients to the proxy: a table of nf_tables, and the lease under which it works.

use std::io;
use std::net::UdpSocket;

use kplane_model::{Cidr, Family};
use nix::sys::socket::{setsockopt, sockopt::Mark};

use super::super::nftables::proxy_tables::{CaptureSettings, CaptureTable, CapturedFrontend};
use super::lease::{Alive, Lease};
use crate::chain;

/// The reason why the kernel alone serves where it has no nf_tables.
pub(super) const NEEDS: &str = "the userspace proxy's capture needs nf_tables";

/// Without a mark of its own, the proxy's connection to a Service's address would come back to the proxy: anyone who may
/// write EndpointSlices could make it connect to itself without end.
fn needs_mark(own_mark: u32) -> Result<(), String> {
    match own_mark {
        0 => Err(
            "the userspace proxy needs a mark of its own connections: set --own-mark to another number than 0"
                .to_owned(),
        ),
        _ => Ok(()),
    }
}

/// The rules of one family, which end with this object.
#[derive(Debug)]
pub(super) struct Capture {
    table: CaptureTable,
    /// It holds until it is dropped.
    _lease: Lease,
}

impl Capture {
    /// Creates the rules.
    ///
    /// # Errors
    /// The missing part, human-readable.
    pub(super) fn open(
        family: Family,
        settings: CaptureSettings,
        alive: Alive,
    ) -> Result<Self, String> {
        needs_mark(settings.own_mark)?;
        let table = CaptureTable::create(family, settings).map_err(|error| {
            if error.is_missing() {
                format!("{NEEDS}: {}", chain(&error))
            } else {
                chain(&error)
            }
        })?;
        let renew = datagrams(settings)?;
        Ok(Self {
            table,
            _lease: Lease::start(family, alive, renew)?,
        })
    }

    /// Deletes frontends, and adds others, which are not there yet.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(super) fn change(
        &mut self,
        delete: &[CapturedFrontend],
        add: &[CapturedFrontend],
    ) -> Result<(), String> {
        let changed = self.table.change(delete, add);
        changed.map_err(|error| chain(&error))
    }

    /// Deletes all frontends, so that the kernel serves them.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(super) fn clear(&mut self) -> Result<(), String> {
        self.table.clear().map_err(|error| chain(&error))
    }

    /// Replaces the addresses with node ports.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(super) fn set_nodes(&mut self, ranges: &[Cidr]) -> Result<(), String> {
        self.table.set_nodes(ranges).map_err(|error| chain(&error))
    }
}

/// Returns what renews the lease of a table of nf_tables: a datagram to the proxy's address, which a rule of the table sees as
/// it leaves this process. It takes no transaction.
fn datagrams(settings: CaptureSettings) -> Result<impl FnMut() -> Result<(), String>, String> {
    let ip = settings.socket.ip();
    let failed = move |error: io::Error| format!("cannot send datagrams to {ip}: {error}");
    let socket = UdpSocket::bind((ip, 0)).map_err(failed)?;
    let to = socket.local_addr().map_err(failed)?;
    setsockopt(&socket, Mark, &settings.own_mark).map_err(|errno| failed(errno.into()))?;
    socket.connect(to).map_err(failed)?;
    socket.set_nonblocking(true).map_err(failed)?;
    Ok(move || {
        // What came back is not needed.
        while socket.recv(&mut [0; 1]).is_ok() {}
        match socket.send(&[0]) {
            // Another program's rule drops it, but behind that of the table.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
            sent => sent.map(drop).map_err(failed),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_mark_the_proxy_would_meet_its_own_connections() {
        assert!(needs_mark(0).is_err_and(|reason| reason.contains("--own-mark")));
        assert_eq!(needs_mark(0x50), Ok(()));
    }
}
