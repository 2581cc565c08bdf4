//! Text of a manifest: whatever it is, objects and issues; and every object converts.

#![no_main]

use kplane_desired_state::convert;
use kplane_desired_state::k8s::Object;
use kplane_desired_state::source::manifests::parse;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    for located in parse(text.to_vec()).objects {
        match &located.object {
            Object::Service(service) => drop(convert::service(
                service,
                &located.location,
                &convert::ExternalIps::All,
            )),
            Object::EndpointSlice(slice) => drop(convert::slice(slice, &located.location)),
            Object::Node(node) => drop(convert::node(node, &located.location)),
            Object::ServiceCidr(cidr) => drop(convert::service_cidr(cidr, &located.location)),
            Object::NetworkPolicy(policy) => {
                drop(convert::network_policy(policy, &located.location));
            }
            Object::Namespace(namespace) => drop(convert::namespace(namespace)),
            Object::Pod(pod) => drop(convert::pod(pod)),
            Object::ClusterNetworkPolicy(policy) => {
                drop(convert::cluster_policy(policy, &located.location));
            }
        }
    }
});
