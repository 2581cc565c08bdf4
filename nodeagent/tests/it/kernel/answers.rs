//! UDP answers of the userspace proxy to clients that are gone.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use kplane_rig::kernel::in_netns;
use nix::sys::socket::sockopt::IpTransparent;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, SockaddrIn, bind, sendto, setsockopt, socket,
};

use super::proxied::{NODE, leads, manifests, node, start};

const QUIET: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 10);
const NOISY: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 11);

/// Questions of the quiet client.
const QUESTIONS: usize = 30;

/// Starts a server that answers each datagram so many times; returns its port.
fn server(answers: usize, bytes: usize) -> u16 {
    let socket = UdpSocket::bind((NODE, 0)).unwrap();
    let port = socket.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let mut buffer = vec![0; bytes];
        while let Ok((_, from)) = socket.recv_from(&mut buffer) {
            for _ in 0..answers {
                let _ = socket.send_to(&vec![0; bytes], from);
            }
        }
    });
    port
}

fn service(name: &str, ip: Ipv4Addr, port: u16) -> String {
    format!(
        "---\napiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: shop}}\nspec: {{clusterIP: {ip}, clusterIPs: \
         [{ip}], ports: [{{port: 53, protocol: UDP}}]}}\n---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: \
         {{name: {name}-x, namespace: shop, labels: {{kubernetes.io/service-name: {name}}}}}\naddressType: IPv4\nports: \
         [{{name: '', port: {port}, protocol: UDP}}]\nendpoints: [{{addresses: [{NODE}]}}]\n"
    )
}

/// Opens the socket of a client with an address of the node's link at which no machine is.
fn gone(last: u8) -> OwnedFd {
    let (kind, flags) = (SockType::Datagram, SockFlag::empty());
    let client = socket(AddressFamily::Inet, kind, flags, None).unwrap();
    setsockopt(&client, IpTransparent, &true).unwrap();
    bind(client.as_raw_fd(), &SockaddrIn::new(172, 20, 0, last, 5000)).unwrap();
    client
}

/// The kernel holds answers to a client whose link address it does not know, and counts them for the socket that sent them.
#[test]
fn answers_to_clients_that_are_gone_hold_up_no_other_client() {
    in_netns(|| {
        node();
        let services = [
            service("dns", QUIET, server(1, 64)),
            service("noise", NOISY, server(40, 1400)),
        ];
        let folder = manifests(&services.concat());
        let mut agent = start(&folder, &["--backend", "userspace", "--proxy-threads=1"]);
        agent.until("update applied");
        leads(QUIET);
        leads(NOISY);
        let (stop, stopped) = (
            Arc::new(AtomicBool::new(false)),
            Arc::new(AtomicBool::new(false)),
        );
        let (ends, sent) = (stop.clone(), stopped.clone());
        let clients: Vec<OwnedFd> = (100..140).map(gone).collect();
        let to = SockaddrIn::from(std::net::SocketAddrV4::new(NOISY, 53));
        let noise = std::thread::spawn(move || {
            while !ends.load(Relaxed) {
                for client in &clients {
                    sendto(client.as_raw_fd(), b"?", &to, MsgFlags::empty()).unwrap();
                }
                sent.store(true, Relaxed);
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        let client = UdpSocket::bind((NODE, 0)).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        client.connect(SocketAddr::from((QUIET, 53))).unwrap();
        crate::support::eventually("noise", || stopped.load(Relaxed).then_some(()));
        let answered = (0..QUESTIONS)
            .filter(|_| {
                client.send(b"?").unwrap();
                std::thread::sleep(Duration::from_millis(20));
                client.recv(&mut [0; 64]).is_ok()
            })
            .count();
        stop.store(true, Relaxed);
        noise.join().unwrap();
        assert_eq!(answered, QUESTIONS);
        agent.stop();
    });
}
