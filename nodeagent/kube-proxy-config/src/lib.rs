//! kube-proxy's configuration file.
