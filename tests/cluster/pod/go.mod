// The program of the real cluster's test pods: the standard library only.
module kplane/tests/cluster/pod

go 1.26.0
