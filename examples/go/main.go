// Watchservice prints what one Service means on the nodes of a cluster, now and after every change.
//
//	watchservice shop/web                                     a control plane on this machine, in plain text
//	watchservice -server HOST:7444 -ca ca.crt -token-file FILE shop/web
//	watchservice -server HOST:7444 -ca ca.crt -certificate FILE -key FILE shop/web
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
	server      = flag.String("server", "127.0.0.1:7444", "`address` of the control plane's status port")
	authority   = flag.String("ca", "", "`file` of the authority of the control plane's certificate; none = plain text")
	certificate = flag.String("certificate", "", "`file` of the client's certificate")
	key         = flag.String("key", "", "`file` of its key")
	tokenFile   = flag.String("token-file", "", "`file` of the client's token")
)

func main() {
	log.SetFlags(0)
	flag.Parse()
	namespace, name, found := strings.Cut(flag.Arg(0), "/")
	if !found {
		log.Fatal("usage: watchservice [FLAGS] NAMESPACE/NAME")
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
	request := &pb.WatchServiceRequest{Namespace: namespace, Name: name}
	for {
		err := watch(client, request)
		switch status.Code(err) {
		case codes.Unauthenticated, codes.PermissionDenied, codes.InvalidArgument:
			// Trying again does not help.
			log.Fatal(err)
		}
		log.Print("watching again: ", err)
		// Jitter, so that all clients of a control plane that stopped do not come back at once.
		time.Sleep(500*time.Millisecond + rand.N(1500*time.Millisecond))
	}
}

// watch follows the Service until the stream ends.
func watch(client pb.DesiredStateServiceClient, request *pb.WatchServiceRequest) error {
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	stream, err := client.WatchService(ctx, request)
	if err != nil {
		return err
	}
	watchdog := time.AfterFunc(silence, func() { cancel(errors.New("the control plane is silent")) })
	defer watchdog.Stop()
	var picture picture
	printed := ""
	for {
		state, err := stream.Recv()
		if err != nil {
			return errors.Join(err, context.Cause(ctx))
		}
		watchdog.Reset(silence)
		picture.take(state)
		if !state.Complete {
			continue
		}
		// Messages of a quiet stream change nothing.
		if text := picture.text(state); text != printed {
			fmt.Printf("%s/%s at revision %d: %s\n", request.Namespace, request.Name, state.Revision, text)
			printed = text
		}
	}
}

// picture is what the Service means, as far as it is known: first for all nodes, then for single ones. A snapshot takes
// its place, so a program that acts on deletions must also check SourceState.confidence; this one prints the doubt.
type picture struct {
	programs map[string]*pb.SharedProgram
	own      map[string]*pb.ServiceProgram
	local    map[string]*pb.LocalEndpoints
}

func (p *picture) take(state *pb.LayeredState) {
	if state.Snapshot {
		*p = picture{
			programs: map[string]*pb.SharedProgram{},
			own:      map[string]*pb.ServiceProgram{},
			local:    map[string]*pb.LocalEndpoints{},
		}
	}
	for _, program := range state.Programs {
		p.programs[port(program.Program.Key)] = program
	}
	for _, key := range state.DeletedPrograms {
		delete(p.programs, port(key))
	}
	for _, on := range state.NodeObjects {
		// Unknown kinds are for newer clients.
		switch object := on.Object.Kind.(type) {
		case *pb.Object_Service:
			p.own[port(object.Service.Key)+" "+on.Node] = object.Service
		case *pb.Object_Local:
			p.local[port(object.Local.Key)+" "+on.Node] = object.Local
		}
	}
	for _, gone := range state.DeletedNodeObjects {
		switch key := gone.Key.Kind.(type) {
		case *pb.ObjectKey_Service:
			delete(p.own, port(key.Service)+" "+gone.Node)
		case *pb.ObjectKey_Local:
			delete(p.local, port(key.Local)+" "+gone.Node)
		}
	}
}

// text describes the picture, with the doubt of the control plane about it.
func (p *picture) text(state *pb.LayeredState) string {
	first := strings.ToLower(strings.TrimPrefix(state.ServiceState.String(), "SERVICE_STATE_"))
	if state.Reason != "" {
		first += ": " + state.Reason
	}
	lines := []string{}
	for port, program := range p.programs {
		size := len(program.Program.ClusterIp)
		address := endpoints(append(slices.Clone(program.Program.ClusterIp), be(program.Program.Port)...), size)
		lines = append(lines, fmt.Sprintf("  %s %s -> %s", port, address, endpoints(program.Program.Endpoints, size)))
		for _, zone := range program.Zones {
			in := endpoints(zone.Program.Endpoints, size)
			lines = append(lines, fmt.Sprintf("  %s in zone %s -> %s", port, zone.Zone, in))
		}
	}
	for place, program := range p.own {
		from := endpoints(program.Endpoints, len(program.ClusterIp))
		lines = append(lines, fmt.Sprintf("  %s -> %s", strings.Replace(place, " ", " from node ", 1), from))
	}
	for place, local := range p.local {
		size := 4
		if local.Key.Family == pb.Family_FAMILY_IPV6 {
			size = 16
		}
		ready := endpoints(local.Ready, size)
		lines = append(lines, fmt.Sprintf("  %s: %s", strings.Replace(place, " ", " on node ", 1), ready))
	}
	slices.Sort(lines)
	if doubt := state.Source.GetDoubt(); doubt != "" {
		lines = append(lines, "  something may be missing: "+doubt)
	}
	return strings.Join(append([]string{first}, lines...), "\n")
}

func port(key *pb.ServiceKey) string {
	protocol := strings.TrimPrefix(key.Protocol.String(), "PROTOCOL_")
	family := strings.TrimPrefix(key.Family.String(), "FAMILY_")
	return fmt.Sprintf("%s/%s/%s", key.PortName, protocol, family)
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
