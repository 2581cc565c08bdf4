#!/bin/sh
# Generates the package kplanev1 from kplane's .proto files. Needs Go, and protoc (Debian: protobuf-compiler).
#
#   ./generate.sh [FOLDER-OF-PROTO-FILES]
set -eu
cd "$(dirname "$0")"
proto=${1:-../../proto/proto}
module=kplane.example/watchservice
# The two plugins of protoc, in the versions of go.mod.
GOBIN="$PWD/bin" go install tool
options=module=$module
for file in "$proto"/kplane/v1/*.proto; do
    options=$options,Mkplane/v1/$(basename "$file")=$module/kplanev1
done
PATH="$PWD/bin:$PATH" protoc -I "$proto" "--go_out=$options:." "--go-grpc_out=$options:." "$proto"/kplane/v1/*.proto
