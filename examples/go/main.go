// Watchnode prints where a node should send the traffic of each Service, now and after every change.
//
//	watchnode node-1                                     a control plane on this machine, in plain text
//	watchnode -server HOST:7466 -ca ca.crt -token-file FILE node-1
//	watchnode -server HOST:7466 -ca ca.crt -certificate FILE -key FILE node-1
//
// docs/tools.md of kplane shows how to build it, and explains what it does.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	pb "github.com/kplane/kplane/api/kplanev1"
)

// The control plane sends something every 5 s. Silence for longer than this means that the stream is dead.
const silence = 15 * time.Second

var (
	server      = flag.String("server", "127.0.0.1:7466", "`address` of the control plane's status port")
	authority   = flag.String("ca", "", "`file` of the authority of the control plane's certificate; none = plain text")
	certificate = flag.String("certificate", "", "`file` of the client's certificate")
	key         = flag.String("key", "", "`file` of its key")
	tokenFile   = flag.String("token-file", "", "`file` of the client's token")
)

func main() {
	log.SetFlags(0)
	flag.Parse()
	if flag.NArg() != 1 {
		log.Fatal("usage: watchnode [FLAGS] NODE")
	}
	options, err := dialOptions()
	if err != nil {
		log.Fatal(err)
	}
	connection, err := grpc.NewClient(*server, options...)
	if err != nil {
		log.Fatal(err)
	}
	client := pb.NewDesiredStateServiceClient(connection)
	request := &pb.WatchNodeRequest{NodeName: flag.Arg(0)}
	for {
		err := watch(client, request)
		switch status.Code(err) {
		case codes.Unauthenticated, codes.PermissionDenied, codes.NotFound, codes.InvalidArgument:
			// Trying again does not help.
			log.Fatal(err)
		}
		log.Print("watching again: ", err)
		// Jitter, so that all clients of a control plane that stopped do not come back at once.
		time.Sleep(500*time.Millisecond + rand.N(1500*time.Millisecond))
	}
}

// watch follows the node until the stream ends.
func watch(client pb.DesiredStateServiceClient, request *pb.WatchNodeRequest) error {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	stream, err := client.WatchNode(ctx, request)
	if err != nil {
		return err
	}
	watchdog := time.AfterFunc(silence, func() { cancel(errors.New("the control plane is silent")) })
	defer watchdog.Stop()
	picture := map[string]string{}
	printed := ""
	for {
		state, err := stream.Recv()
		if err != nil {
			return errors.Join(err, context.Cause(ctx))
		}
		watchdog.Reset(silence)
		take(picture, state)
		if !state.Complete {
			continue
		}
		// Messages of a quiet stream change nothing.
		if text := text(picture, state.Source.GetDoubt()); text != printed {
			fmt.Printf("%s at revision %d%s\n", request.NodeName, state.Revision, text)
			printed = text
		}
	}
}

// take applies a message to the lines of ServicePorts. A snapshot takes the place of all, so a program that acts on
// deletions must also check SourceState.confidence; this one prints the doubt.
func take(picture map[string]string, state *pb.DesiredState) {
	if state.Snapshot {
		clear(picture)
	}
	for _, object := range state.Objects {
		// Other kinds, and those for newer clients, are of no interest here.
		if program := object.GetService(); program != nil {
			size := len(program.ClusterIp)
			address := endpoints(append(slices.Clone(program.ClusterIp), be(program.Port)...), size)
			picture[port(program.Key)] = address + " -> " + endpoints(program.Endpoints, size)
		}
	}
	for _, key := range state.Deleted {
		if service := key.GetService(); service != nil {
			delete(picture, port(service))
		}
	}
}

// text describes the picture, with the doubt of the control plane about it.
func text(picture map[string]string, doubt string) string {
	lines := []string{""}
	for port, line := range picture {
		lines = append(lines, "  "+port+" "+line)
	}
	slices.Sort(lines)
	if doubt != "" {
		lines = append(lines, "  something may be missing: "+doubt)
	}
	return strings.Join(lines, "\n")
}

func port(key *pb.ServiceKey) string {
	protocol := strings.TrimPrefix(key.Protocol.String(), "PROTOCOL_")
	family := strings.TrimPrefix(key.Family.String(), "FAMILY_")
	return fmt.Sprintf("%s/%s:%s/%s/%s", key.Namespace, key.Name, key.PortName, protocol, family)
}

// endpoints unpacks addresses of 4 or 16 bytes, each with a port of 2 bytes.
func endpoints(packed []byte, size int) string {
	var texts []string
	for one := range slices.Chunk(packed, size+2) {
		if ip, ok := netip.AddrFromSlice(one[:size]); ok {
			texts = append(texts, netip.AddrPortFrom(ip, binary.BigEndian.Uint16(one[size:])).String())
		}
	}
	if texts == nil {
		return "nothing"
	}
	return strings.Join(texts, " ")
}

func be(port uint32) []byte {
	return binary.BigEndian.AppendUint16(nil, uint16(port))
}

func dialOptions() ([]grpc.DialOption, error) {
	if *authority == "" {
		return []grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}, nil
	}
	pem, err := os.ReadFile(*authority)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS13}
	if !config.RootCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s has no certificate", *authority)
	}
	if *certificate != "" {
		pair, err := tls.LoadX509KeyPair(*certificate, *key)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{pair}
	}
	options := []grpc.DialOption{grpc.WithTransportCredentials(credentials.NewTLS(config))}
	if *tokenFile != "" {
		options = append(options, grpc.WithPerRPCCredentials(token(*tokenFile)))
	}
	return options, nil
}

// token is the file of a token. It is read for each call, so that a renewed one is used.
type token string

func (t token) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	text, err := os.ReadFile(string(t))
	if err != nil {
		return nil, err
	}
	return map[string]string{"authorization": "Bearer " + strings.TrimSpace(string(text))}, nil
}

func (t token) RequireTransportSecurity() bool { return true }
