//! A proxy with one ServicePort, servers and clients.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use kplane_model::{
    EndpointAddr, Family, FrontendAddr, KeyParts, Protocol, ProxyPort, ServiceKey, ServiceName,
};
use kplane_userproxy::{
    Bundle, Counts, Endpoints, ListenerId, Options, Pool, PortSpec, Proxy, Role, RouteSpec,
    Settings,
};

/// Longest wait of a test for something that takes milliseconds.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn key(protocol: Protocol) -> ServiceKey {
    ServiceKey::from(KeyParts {
        service: ServiceName::new("shop", "web"),
        port_name: "".into(),
        protocol,
        family: Family::V4,
    })
}

/// A proxy, and the ServicePort `shop/web`.
pub(crate) struct Served {
    pub(crate) proxy: Proxy,
    pub(crate) at: SocketAddr,
    pub(crate) listener: ListenerId,
    protocol: Protocol,
    spec: PortSpec,
}

impl Served {
    /// Serves endpoints.
    pub(crate) fn new(protocol: Protocol, endpoints: &[SocketAddr], options: Options) -> Self {
        Self::with(Settings::default(), protocol, endpoints, options)
    }

    pub(crate) fn with(
        settings: Settings,
        protocol: Protocol,
        endpoints: &[SocketAddr],
        options: Options,
    ) -> Self {
        let proxy = Proxy::start(settings).unwrap();
        let at = FrontendAddr::NodePort {
            protocol,
            port: 30000,
        };
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let (listener, bound) = proxy.listen(any, protocol, Role::Place(at)).unwrap();
        let spec = PortSpec {
            key: key(protocol),
            endpoints: Endpoints::default(),
            routes: vec![RouteSpec {
                at,
                outside: Pool::Cluster,
                inside: Pool::Cluster,
                sources: Vec::new(),
            }],
            options,
            is_listed: true,
        };
        let at = bound;
        let mut served = Self {
            proxy,
            at,
            listener,
            protocol,
            spec,
        };
        served.change(|spec| spec.endpoints.cluster = addrs(endpoints));
        served
    }

    /// Has another proxy continue with what `pass` makes of everything that is open.
    pub(crate) fn succeeded_by(self, pass: impl FnOnce(Bundle) -> Bundle) -> Self {
        self.succeeded(None, pass)
    }

    /// The same with a number of threads.
    pub(crate) fn succeeded_with(
        self,
        threads: usize,
        pass: impl FnOnce(Bundle) -> Bundle,
    ) -> Self {
        self.succeeded(Some(threads), pass)
    }

    fn succeeded(self, threads: Option<usize>, pass: impl FnOnce(Bundle) -> Bundle) -> Self {
        let bundle = pass(self.proxy.pack());
        drop(self.proxy);
        let proxy = Proxy::start(Settings {
            threads,
            inherited: Some(bundle),
            ..Settings::default()
        })
        .unwrap();
        let change = (key(self.protocol), Some(self.spec.clone()));
        proxy.table().change([change]);
        let role = Role::Place(self.spec.routes[0].at);
        let (listener, at) = proxy.listen(self.at, self.protocol, role).unwrap();
        assert_eq!((listener, at), (self.listener, self.at), "the same socket");
        proxy.settle(Family::V4);
        Self { proxy, ..self }
    }

    /// Serves another ServicePort with the same proxy; returns its address.
    pub(crate) fn another(&self, node_port: u16, endpoints: &[SocketAddr]) -> SocketAddr {
        let mut spec = self.spec.clone();
        spec.key.port_name = "another".into();
        spec.endpoints.cluster = addrs(endpoints);
        let at = FrontendAddr::NodePort {
            protocol: self.protocol,
            port: node_port,
        };
        spec.routes[0].at = at;
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        self.proxy.table().change([(spec.key.clone(), Some(spec))]);
        let listening = self.proxy.listen(any, self.protocol, Role::Place(at));
        listening.unwrap().1
    }

    /// Serves another Service with the same proxy; returns its address.
    pub(crate) fn other(&self, name: &str, node_port: u16, endpoints: &[SocketAddr]) -> SocketAddr {
        let mut spec = self.spec.clone();
        spec.key.service = ServiceName::new("games", name);
        spec.endpoints.cluster = addrs(endpoints);
        let protocol = self.protocol;
        let at = FrontendAddr::NodePort {
            protocol,
            port: node_port,
        };
        spec.routes[0].at = at;
        self.proxy.table().change([(spec.key.clone(), Some(spec))]);
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let listening = self.proxy.listen(any, protocol, Role::Place(at));
        listening.unwrap().1
    }

    /// Returns the counts of a Service of [`Self::other`].
    pub(crate) fn counts_of(&self, name: &str) -> Counts {
        let key = ServiceKey::from(KeyParts {
            service: ServiceName::new("games", name),
            ..KeyParts::clone(&key(self.protocol))
        });
        self.proxy.table().state(&key).unwrap().counts
    }

    /// Configures the ServicePort anew.
    pub(crate) fn change(&mut self, change: impl FnOnce(&mut PortSpec)) {
        change(&mut self.spec);
        let change = (key(self.protocol), Some(self.spec.clone()));
        self.proxy.table().change([change]);
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.at).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    pub(crate) fn udp(&self) -> UdpSocket {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        socket.connect(self.at).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        socket
    }

    pub(crate) fn state(&self) -> ProxyPort {
        self.proxy.table().state(&key(self.protocol)).unwrap()
    }
}

pub(crate) fn addrs(endpoints: &[SocketAddr]) -> Vec<EndpointAddr> {
    endpoints.iter().copied().map(EndpointAddr::from).collect()
}

/// Waits until a condition holds.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "did not happen: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Starts a server that handles each connection on a thread of its own.
pub(crate) fn server(handle: impl Fn(TcpStream) + Send + Sync + Clone + 'static) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let at = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let handle = handle.clone();
            std::thread::spawn(move || handle(stream.unwrap()));
        }
    });
    at
}

/// Starts a server that sends its own port, and then everything back.
pub(crate) fn echo() -> SocketAddr {
    server(|mut stream| {
        let port = stream.local_addr().unwrap().port();
        let _ = stream.write_all(&port.to_be_bytes());
        let mut buffer = vec![0; 32 * 1024];
        while let Ok(count @ 1..) = stream.read(&mut buffer) {
            if stream.write_all(&buffer[..count]).is_err() {
                return;
            }
        }
    })
}

/// Reads which server answered.
pub(crate) fn answered(stream: &mut TcpStream) -> std::io::Result<SocketAddr> {
    let mut port = [0; 2];
    stream.read_exact(&mut port)?;
    Ok(SocketAddr::from((
        Ipv4Addr::LOCALHOST,
        u16::from_be_bytes(port),
    )))
}

/// Returns an address at which nothing listens.
pub(crate) fn refusing() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.local_addr().unwrap()
}

/// An address that does not answer: a listener whose queue is full.
pub(crate) struct Silent {
    pub(crate) at: SocketAddr,
    _listener: socket2::Socket,
    _fill: Vec<socket2::Socket>,
}

impl Silent {
    pub(crate) fn new() -> Self {
        use socket2::{Domain, Socket, Type};
        let new = || Socket::new(Domain::IPV4, Type::STREAM.nonblocking(), None).unwrap();
        let listener = new();
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        listener.bind(&any.into()).unwrap();
        listener.listen(0).unwrap();
        let at = listener.local_addr().unwrap().as_socket().unwrap();
        let fill = (0..4).map(|_| {
            let socket = new();
            let _ = socket.connect(&at.into());
            socket
        });
        Self {
            at,
            _fill: fill.collect(),
            _listener: listener,
        }
    }
}

/// Returns an address in 127.0.0.0/8.
pub(crate) fn loopback(last: u8) -> IpAddr {
    IpAddr::from([127, 0, 0, last])
}
