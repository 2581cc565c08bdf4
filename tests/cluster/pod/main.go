// The program of the real cluster's test pods: a server, a client, and a process that waits.
//
//	pod pause                                wait until a signal
//	pod serve [-echo 8080] [-http 8081] [-linger 0s]
//	pod get [-within 5s] URL                 print the body of an answer
//	pod connect [-within 5s] HOST:PORT       print the line of an echo server
//	pod resolve NAME                         print the addresses of a name, one a line
//
// The echo server speaks the protocol of the rig (tests/rig/src/echo.rs): the line "name peer_ip peer_port
// local_ip local_port", at once on a TCP connection, and for each UDP datagram. The name is the host's name. The
// HTTP server answers any path with the same line, and with status 503 on /ready while not-ready exists in /tmp.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// The file that makes the server answer that it is not ready.
const notReady = "/tmp/not-ready"

func main() {
	if len(os.Args) < 2 {
		fail(errors.New("usage: pod pause|serve|get|connect|resolve"))
	}
	args := os.Args[2:]
	var err error
	switch os.Args[1] {
	case "pause":
		<-ended()
	case "serve":
		err = serve(args)
	case "get":
		err = ask(args, get)
	case "connect":
		err = ask(args, connect)
	case "resolve":
		err = ask(args, resolve)
	default:
		err = fmt.Errorf("no command %q", os.Args[1])
	}
	if err != nil {
		fail(err)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "pod:", err)
	os.Exit(1)
}

// ended returns a channel that yields when the process is asked to end.
func ended() <-chan os.Signal {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	return signals
}

// serve runs the servers until a signal, and for the time -linger after it.
func serve(args []string) error {
	flags := flag.NewFlagSet("serve", flag.ExitOnError)
	echo := flags.Int("echo", 8080, "port of the echo server, TCP and UDP")
	web := flags.Int("http", 8081, "port of the HTTP server")
	linger := flags.Duration("linger", 0, "time to go on serving after a signal")
	flags.Parse(args)
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	failed := make(chan error)
	listener, err := net.Listen("tcp", fmt.Sprintf(":%d", *echo))
	if err != nil {
		return err
	}
	go func() { failed <- echoTCP(listener, name) }()
	// A socket for each address: an answer must come from the address that was asked.
	sockets, err := datagrams(*echo)
	if err != nil {
		return err
	}
	for _, socket := range sockets {
		go func() { failed <- echoUDP(socket, name) }()
	}
	go func() { failed <- http.ListenAndServe(fmt.Sprintf(":%d", *web), pages(name)) }()
	select {
	case err := <-failed:
		return err
	case <-ended():
		time.Sleep(*linger)
		return nil
	}
}

func pages(name string) http.Handler {
	pages := http.NewServeMux()
	pages.HandleFunc("/ready", func(answer http.ResponseWriter, _ *http.Request) {
		if _, err := os.Stat(notReady); err == nil {
			http.Error(answer, notReady+" exists", http.StatusServiceUnavailable)
		}
	})
	pages.HandleFunc("/", func(answer http.ResponseWriter, request *http.Request) {
		peer, _ := net.ResolveTCPAddr("tcp", request.RemoteAddr)
		local, _ := request.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
		io.WriteString(answer, line(name, peer.IP, peer.Port, local.IP, local.Port))
	})
	return pages
}

func line(name string, peer net.IP, peerPort int, local net.IP, localPort int) string {
	return fmt.Sprintf("%s %s %d %s %d\n", name, peer, peerPort, local, localPort)
}

func echoTCP(listener net.Listener, name string) error {
	for {
		stream, err := listener.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer stream.Close()
			peer, local := stream.RemoteAddr().(*net.TCPAddr), stream.LocalAddr().(*net.TCPAddr)
			io.WriteString(stream, line(name, peer.IP, peer.Port, local.IP, local.Port))
			io.Copy(stream, stream)
		}()
	}
}

// datagrams opens a socket on each address of this host.
func datagrams(port int) ([]*net.UDPConn, error) {
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	var sockets []*net.UDPConn
	for _, address := range addresses {
		own, ok := address.(*net.IPNet)
		if !ok || own.IP.IsLinkLocalUnicast() {
			continue
		}
		socket, err := net.ListenUDP("udp", &net.UDPAddr{IP: own.IP, Port: port})
		if err != nil {
			return nil, err
		}
		sockets = append(sockets, socket)
	}
	return sockets, nil
}

func echoUDP(socket *net.UDPConn, name string) error {
	local := socket.LocalAddr().(*net.UDPAddr)
	datagram := make([]byte, 1)
	for {
		_, peer, err := socket.ReadFromUDP(datagram)
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return err
			}
			continue // An ICMP error about an earlier answer.
		}
		socket.WriteToUDP([]byte(line(name, peer.IP, peer.Port, local.IP, local.Port)), peer)
	}
}

// ask runs a client within a time and prints its answer.
func ask(args []string, client func(context.Context, string) (string, error)) error {
	flags := flag.NewFlagSet("ask", flag.ExitOnError)
	within := flags.Duration("within", 5*time.Second, "longest wait for the answer")
	flags.Parse(args)
	if flags.NArg() != 1 {
		return errors.New("give one address")
	}
	end, cancel := context.WithTimeout(context.Background(), *within)
	defer cancel()
	answer, err := client(end, flags.Arg(0))
	fmt.Print(answer)
	return err
}

func get(end context.Context, url string) (string, error) {
	request, err := http.NewRequestWithContext(end, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", err
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err == nil && answer.StatusCode != http.StatusOK {
		err = errors.New(answer.Status)
	}
	return string(body), err
}

func connect(end context.Context, address string) (string, error) {
	var dialer net.Dialer
	stream, err := dialer.DialContext(end, "tcp", address)
	if err != nil {
		return "", err
	}
	defer stream.Close()
	if deadline, ok := end.Deadline(); ok {
		stream.SetDeadline(deadline)
	}
	if half, ok := stream.(*net.TCPConn); ok {
		half.CloseWrite()
	}
	answer, err := io.ReadAll(stream)
	return string(answer), err
}

func resolve(end context.Context, name string) (string, error) {
	addresses, err := net.DefaultResolver.LookupHost(end, name)
	text := ""
	for _, address := range addresses {
		text += address + "\n"
	}
	return text, err
}
