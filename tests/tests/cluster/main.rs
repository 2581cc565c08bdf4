//! kplane's programs with a real Kubernetes API server.

mod rig;

kplane_tests::main!(rig::objects_are_made_changed_and_deleted);
