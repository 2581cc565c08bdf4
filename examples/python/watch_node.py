#!/usr/bin/env python3
"""Prints where a node should send the traffic of each Service, and every change.

    watch_node.py NODE                                   a control plane on this machine, in plain text
    watch_node.py NODE --server HOST:7466 --ca ca.crt --token-file FILE
    watch_node.py NODE --server HOST:7466 --ca ca.crt --certificate FILE --key FILE

It needs the package kplane_api, which `cargo xtask clients` generates from kplane's .proto files.
docs/tools.md shows how, and explains what the program does.
"""

import argparse
import ipaddress
import random
import sys
import threading
import time

import grpc

from kplane_api.v1 import agent_pb2, desired_pb2, desired_pb2_grpc, objects_pb2

# The control plane sends something every 5 s. Silence for longer than this means that the stream is dead.
SILENCE = 15

# Trying again does not help against these.
FINAL = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.INVALID_ARGUMENT,
)


def main():
    options = arguments()
    stub = desired_pb2_grpc.DesiredStateServiceStub(connect(options))
    picture = Picture()
    resume = None
    while True:
        request = desired_pb2.WatchNodeRequest(node_name=options.node, resume=resume)
        try:
            for state in alive(stub.WatchNode(request)):
                picture.take(state)
                if state.complete:
                    resume = state.resume
        except grpc.RpcError as error:
            if error.code() in FINAL:
                sys.exit(f"{error.code().name}: {error.details()}")
            print(f"watching again: {error.details()}", file=sys.stderr)
        # Jitter, so that all clients of a control plane that stopped do not come back at once.
        time.sleep(random.uniform(0.5, 2))


def connect(options):
    if not options.ca:
        return grpc.insecure_channel(options.server)
    credentials = grpc.ssl_channel_credentials(
        read(options.ca),
        read(options.key) if options.key else None,
        read(options.certificate) if options.certificate else None,
    )
    if options.token_file:
        token = read(options.token_file).decode().strip()
        call = grpc.access_token_call_credentials(token)
        credentials = grpc.composite_channel_credentials(credentials, call)
    return grpc.secure_channel(options.server, credentials)


def alive(call):
    """Yields the messages of a call, and cancels it when the control plane is silent."""
    while True:
        watchdog = threading.Timer(SILENCE, call.cancel)
        watchdog.daemon = True
        watchdog.start()
        try:
            state = next(call)
        except StopIteration:
            return
        finally:
            watchdog.cancel()
        yield state


class Picture:
    """What the node should have, as far as it is known."""

    def __init__(self):
        # By kind and text of the key.
        self.objects = {}
        # Objects that the snapshot has named so far; None when none is under way.
        self.named = None
        # Keys that may have changed since the last complete picture, and what was printed of each.
        self.changed = set()
        self.printed = {}
        self.doubt = ""

    def take(self, state):
        if state.snapshot:
            self.named = set()
        for obj in state.objects:
            kind = obj.WhichOneof("kind")
            # NodeConfig is of no interest here, and unknown kinds are for newer clients.
            if kind in ("service", "local"):
                self.put(kind, getattr(obj, kind))
        for key in state.deleted:
            kind = key.WhichOneof("kind")
            if kind in ("service", "local"):
                self.drop(kind, text_of(getattr(key, kind)))
        if not state.complete:
            return
        if self.named is not None:
            self.end_snapshot(state.source.confidence)
        self.print(state.source.doubt)

    def put(self, kind, obj):
        key = text_of(obj.key)
        self.objects[kind, key] = obj
        self.changed.add(key)
        if self.named is not None:
            self.named.add((kind, key))

    def drop(self, kind, key):
        self.objects.pop((kind, key), None)
        self.changed.add(key)

    def end_snapshot(self, confidence):
        """Removes what a snapshot did not name, unless the source was not read completely."""
        if confidence != agent_pb2.CONFIDENCE_PARTIAL:
            for kind, key in self.objects.keys() - self.named:
                self.drop(kind, key)
        self.named = None

    def print(self, doubt):
        if doubt != self.doubt:
            self.doubt = doubt
            print(f"! something may be missing: {doubt}" if doubt else "! nothing is missing", flush=True)
        for key in sorted(self.changed):
            before, now = self.printed.pop(key, None), self.line(key)
            if now is not None:
                self.printed[key] = now
            if now != before:
                sign = "-" if now is None else "+" if before is None else "~"
                print(f"{sign} {key}{now or ''}", flush=True)
        self.changed.clear()

    def line(self, key):
        program = self.objects.get(("service", key))
        if program is None:
            return None
        size = len(program.cluster_ip)
        listed = " ".join(endpoints(program.endpoints, size)) or "nothing"
        line = f" {address(program.cluster_ip, program.port)} -> {listed}"
        local = self.objects.get(("local", key))
        if local:
            line += "; on this node " + " ".join(endpoints(local.ready, size))
        return line


def text_of(key):
    port = f":{key.port_name}" if key.port_name else ""
    protocol = objects_pb2.Protocol.Name(key.protocol).removeprefix("PROTOCOL_")
    family = objects_pb2.Family.Name(key.family).removeprefix("FAMILY_")
    return f"{key.namespace}/{key.name}{port}/{protocol} ({family})"


def endpoints(packed, size):
    """Unpacks addresses of 4 or 16 bytes, each with a port of 2 bytes."""
    for start in range(0, len(packed), size + 2):
        one = packed[start : start + size + 2]
        yield address(one[:size], int.from_bytes(one[size:], "big"))


def address(packed, port):
    ip = ipaddress.ip_address(packed)
    return f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"


def read(path):
    with open(path, "rb") as file:
        return file.read()


def arguments():
    parser = argparse.ArgumentParser(description="Prints where a node should send the traffic of each Service.")
    parser.add_argument("node")
    parser.add_argument("--server", default="127.0.0.1:7466")
    for name in ("--ca", "--token-file", "--certificate", "--key"):
        parser.add_argument(name, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        pass
