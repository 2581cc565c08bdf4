//! TCP connections whose endpoints are well.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kplane_model::{Cidr, Protocol, ProxyStage};
use kplane_userproxy::{Failure, Options};

use crate::fixture::{Served, answered, echo, eventually, key, loopback, server};

fn serve(endpoints: &[SocketAddr], options: Options) -> Served {
    Served::new(Protocol::Tcp, endpoints, options)
}

/// Bytes that show a gap, a swap or a repetition.
fn pattern(len: usize) -> Vec<u8> {
    let mut state = 7u32;
    let mut byte = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    (0..len).map(|_| byte()).collect()
}

#[test]
fn connections_go_around_and_are_counted() {
    let servers = [echo(), echo(), echo()];
    let served = serve(&servers, Options::default());
    let mut counts = BTreeMap::new();
    for _ in 0..9 {
        let mut stream = served.connect();
        *counts.entry(answered(&mut stream).unwrap()).or_insert(0) += 1;
        stream.write_all(b"hello").unwrap();
        let mut back = [0; 5];
        stream.read_exact(&mut back).unwrap();
        assert_eq!(&back, b"hello");
    }
    assert_eq!(counts, servers.map(|at| (at, 3)).into());
    eventually("all connections have ended", || {
        served.state().counts.open == 0
    });
    let counts = served.state().counts;
    assert_eq!(
        (counts.opened, counts.to_endpoints, counts.to_clients),
        (9, 45, 63)
    );
    assert_eq!((counts.failed, served.proxy.open()), ([0; 5], [0, 0]));
}

/// There are more connections than a thread shows in one step.
#[test]
fn connections_are_shown_with_their_clients() {
    let served = serve(&[echo()], Options::default());
    let mut streams: Vec<TcpStream> = (0..150).map(|_| served.connect()).collect();
    for stream in &mut streams {
        answered(stream).unwrap();
    }
    streams[0].write_all(b"hello").unwrap();
    streams[0].read_exact(&mut [0; 5]).unwrap();
    let show = |keys| {
        let all = Arc::new(Mutex::new(Vec::new()));
        let seen = all.clone();
        let each = move |index, shown| seen.lock().unwrap().push((index, shown));
        assert!(served.proxy.show(keys, Duration::from_secs(10), each));
        std::mem::take(&mut *all.lock().unwrap())
    };
    let all = show(vec![key(Protocol::Udp), key(Protocol::Tcp)]);
    let clients: BTreeSet<_> = all.iter().map(|(_, shown)| shown.client).collect();
    let expected = streams.iter().map(|stream| stream.local_addr().unwrap());
    assert_eq!((all.len(), clients), (150, expected.collect()));
    let talker = streams[0].local_addr().unwrap();
    for (index, shown) in &all {
        assert_eq!((*index, shown.stage), (1, ProxyStage::Open));
        assert!(shown.age.is_some_and(|age| age < Duration::from_secs(60)));
        let [to_endpoint, _] = shown.bytes.unwrap();
        assert_eq!(to_endpoint, if shown.client == talker { 5 } else { 0 });
    }
    assert!(show(vec![key(Protocol::Udp)]).is_empty());
    // The server ends its side as well, or goes on: both are no open connection.
    let is_open = |client| {
        show(vec![key(Protocol::Tcp)])
            .iter()
            .any(|(_, shown)| shown.client == client && shown.stage == ProxyStage::Open)
    };
    streams[1].shutdown(Shutdown::Write).unwrap();
    let ended = streams[1].local_addr().unwrap();
    eventually("one side has ended", || !is_open(ended));
}

#[test]
fn much_data_passes_both_ways_at_once() {
    let served = serve(&[echo()], Options::default());
    let mut stream = served.connect();
    answered(&mut stream).unwrap();
    let sent = pattern(20 * 1024 * 1024);
    let mut writer = stream.try_clone().unwrap();
    let copy = sent.clone();
    let write = std::thread::spawn(move || {
        writer.write_all(&copy).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
    });
    let mut back = Vec::new();
    stream.read_to_end(&mut back).unwrap();
    write.join().unwrap();
    assert!(
        back == sent,
        "{} bytes came back of {}",
        back.len(),
        sent.len()
    );
}

#[test]
fn a_reader_that_pauses_gets_everything() {
    let data = pattern(8 * 1024 * 1024);
    let sent = data.clone();
    let served = serve(
        &[server(move |mut stream| stream.write_all(&sent).unwrap())],
        Options::default(),
    );
    let mut stream = served.connect();
    // The data fills all buffers on the way before the first byte is read.
    let mut last = 0;
    eventually("the buffers are full", || {
        std::thread::sleep(Duration::from_millis(20));
        let now = served.state().counts.to_clients;
        let is_full = now == last && now > 0;
        last = now;
        is_full
    });
    let mut all = Vec::new();
    stream.read_to_end(&mut all).unwrap();
    assert!(all == data, "{} bytes came of {}", all.len(), data.len());
}

#[test]
fn u11_an_end_in_one_direction_leaves_the_other_open() {
    let served = serve(
        &[server(|mut stream| {
            let mut all = Vec::new();
            stream.read_to_end(&mut all).unwrap();
            stream.write_all(&all).unwrap();
        })],
        Options::default(),
    );
    let mut stream = served.connect();
    stream.write_all(b"question").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "question");
    eventually("the connection has ended", || served.proxy.open() == [0, 0]);
}

#[test]
fn a_reset_is_passed_on_as_a_reset() {
    let reset = |stream: &TcpStream| {
        let socket = socket2::SockRef::from(stream);
        socket.set_linger(Some(Duration::ZERO)).unwrap();
    };
    let (heard, result) = std::sync::mpsc::channel();
    let served = serve(
        &[server(move |mut stream| {
            let mut first = [0];
            stream.read_exact(&mut first).unwrap();
            if first == *b"r" {
                // Resets the connection itself.
                return reset(&stream);
            }
            let _ = heard.send(stream.read(&mut first).map_err(|error| error.kind()));
        })],
        Options::default(),
    );
    let mut stream = served.connect();
    stream.write_all(b"r").unwrap();
    let error = stream.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);

    let mut stream = served.connect();
    stream.write_all(b"x").unwrap();
    eventually("the endpoint has the connection", || {
        served.state().counts.to_endpoints == 2
    });
    reset(&stream);
    drop(stream);
    assert_eq!(result.recv().unwrap(), Err(ErrorKind::ConnectionReset));
    eventually("both have ended", || served.proxy.open() == [0, 0]);
}

#[test]
fn urgent_data_stays_in_its_place() {
    let served = serve(&[echo()], Options::default());
    let mut stream = served.connect();
    answered(&mut stream).unwrap();
    for round in 0..20u8 {
        stream.write_all(&[round; 10]).unwrap();
        socket2::SockRef::from(&stream).send_out_of_band(&[round]).unwrap();
        stream.write_all(&[round; 10]).unwrap();
        let mut back = [0; 21];
        stream.read_exact(&mut back).unwrap();
        assert_eq!(back, [round; 21]);
    }
}

#[test]
fn u10_without_an_endpoint_the_client_gets_a_reset() {
    let mut served = serve(&[], Options::default());
    let error = served.connect().read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert_eq!(
        served.state().counts.failed[Failure::NoEndpoint as usize],
        1
    );
    let at = echo();
    served.change(|spec| spec.endpoints.cluster = crate::fixture::addrs(&[at]));
    assert_eq!(answered(&mut served.connect()).unwrap(), at);
}

#[test]
fn a8_source_ranges_exclude_clients() {
    let mut served = serve(&[echo()], Options::default());
    served.change(|spec| spec.routes[0].sources = vec!["10.0.0.0/8".parse::<Cidr>().unwrap()]);
    let error = served.connect().read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    served.change(|spec| spec.routes[0].sources.push("127.0.0.1/32".parse().unwrap()));
    answered(&mut served.connect()).unwrap();
}

#[test]
fn a11_a_client_stays_with_its_endpoint_until_it_is_forgotten() {
    let servers = [echo(), echo(), echo()];
    let options = Options {
        affinity: Some(Duration::from_secs(10_800)),
        ..Options::default()
    };
    let served = serve(&servers, options);
    let first = answered(&mut served.connect()).unwrap();
    for _ in 0..5 {
        assert_eq!(answered(&mut served.connect()).unwrap(), first);
    }
    let key = key(Protocol::Tcp);
    let remembered = served.proxy.table().remembered(&key);
    assert_eq!(remembered.len(), 1);
    assert_eq!(
        (remembered[0].0, remembered[0].1.port),
        (loopback(1), first.port())
    );
}

#[test]
fn open_connections_survive_every_change() {
    let servers = [echo(), echo()];
    let mut served = serve(&servers, Options::default());
    let mut stream = served.connect();
    let first = answered(&mut stream).unwrap();
    let rest: Vec<_> = servers.into_iter().filter(|at| *at != first).collect();
    served.change(|spec| spec.endpoints.cluster = crate::fixture::addrs(&rest));
    served.proxy.close(served.listener);
    eventually("nothing listens", || TcpStream::connect(served.at).is_err());
    stream.write_all(b"still here").unwrap();
    let mut back = [0; 10];
    stream.read_exact(&mut back).unwrap();
    assert_eq!(&back, b"still here");
}
