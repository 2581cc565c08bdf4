// CoreDNS with the plugins that a cluster's DNS needs, and those that Kubernetes' own tests use, for the real cluster of
// the tests.
package main

import (
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/hosts"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/log"
	_ "github.com/coredns/coredns/plugin/ready"

	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
)

func main() {
	// A query passes the plugins in this order.
	dnsserver.Directives = []string{"log", "errors", "health", "ready", "cache", "hosts", "kubernetes"}
	coremain.Run()
}
