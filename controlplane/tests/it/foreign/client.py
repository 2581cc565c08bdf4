"""A client of kplane's gRPC ports that shares no code with kplane: grpcio, and the descriptors of the protocol.

client.py DESCRIPTORS ADDRESS AUTHORITY [--certificate FILE --key FILE] [--token TEXT] TASK [ARGUMENT]

Tasks:
  nodes         print the revision that the agent of each node has applied
  watch NODE    print the same for each answer of a watch, until the agent of a node has applied one
  agent NODE    say Hello, print what comes until the desired state is complete, and report it as applied

Each line of the output is a JSON object. A refusal is one with its code and its text.
"""

import argparse
import json
import queue
import sys

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

DEADLINE = 30


def arguments():
    parser = argparse.ArgumentParser()
    for name in ("descriptors", "address", "authority"):
        parser.add_argument(name)
    for name in ("--certificate", "--key", "--token"):
        parser.add_argument(name)
    parser.add_argument("task", choices=("nodes", "watch", "agent"))
    parser.add_argument("argument", nargs="?")
    return parser.parse_args()


class Plane:
    """A control plane."""

    def __init__(self, options):
        self.pool = descriptor_pool.DescriptorPool()
        files = descriptor_pb2.FileDescriptorSet.FromString(read(options.descriptors))
        for file in files.file:
            self.pool.Add(file)
        credentials = grpc.ssl_channel_credentials(
            read(options.authority),
            read(options.key) if options.key else None,
            read(options.certificate) if options.certificate else None,
        )
        names = [("grpc.ssl_target_name_override", "localhost")]
        self.channel = grpc.secure_channel(options.address, credentials, names)
        self.metadata = [("authorization", "Bearer " + options.token)] if options.token else None

    def message(self, name):
        found = self.pool.FindMessageTypeByName("kplane.v1." + name)
        if hasattr(message_factory, "GetMessageClass"):
            return message_factory.GetMessageClass(found)
        return message_factory.MessageFactory(self.pool).GetPrototype(found)

    def call(self, kind, method, answer, request):
        """Calls a method; `kind` names the streams of both sides as grpcio does."""
        stub = getattr(self.channel, kind)(
            "/kplane.v1." + method,
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=self.message(answer).FromString,
        )
        return stub(request, metadata=self.metadata, timeout=DEADLINE)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def say(**line):
    print(json.dumps(line), flush=True)


def applied(fleet):
    return {node.name: node.report.applied_revision for node in fleet.nodes}


def nodes(plane):
    request = plane.message("GetFleetRequest")()
    fleet = plane.call("unary_unary", "StatusService/GetFleet", "Fleet", request)
    say(applied=applied(fleet))


def watch(plane, name):
    request = plane.message("GetFleetRequest")()
    for fleet in plane.call("unary_stream", "StatusService/WatchFleet", "Fleet", request):
        say(applied=applied(fleet))
        if applied(fleet).get(name):
            return


def agent(plane, name):
    outbox = queue.Queue()
    message = plane.message("AgentMessage")
    hello = message()
    hello.hello.protocol_version = 1
    hello.hello.node_name = name
    hello.hello.agent_version = "python"
    outbox.put(hello)
    report = message()
    # grpcio sends what the iterator yields. Its end, None, closes the agent's side.
    answers = plane.call("stream_stream", "AgentService/Sync", "ServerMessage", iter(outbox.get, None))
    for answer in answers:
        kind = answer.WhichOneof("kind")
        if kind == "welcome":
            report.report.epoch = answer.welcome.epoch
            say(welcome=answer.welcome.protocol_version)
        elif kind == "update":
            update = answer.update
            say(objects=len(update.objects), snapshot=update.snapshot, complete=update.HasField("end"))
            if update.HasField("end"):
                report.report.received_revision = update.end.revision
                report.report.applied_revision = update.end.revision
                outbox.put(report)
                outbox.put(None)


def main():
    options = arguments()
    plane = Plane(options)
    try:
        if options.task == "nodes":
            nodes(plane)
        elif options.task == "watch":
            watch(plane, options.argument)
        else:
            agent(plane, options.argument)
    except grpc.RpcError as error:
        say(code=error.code().name, details=error.details())
        sys.exit(1)


main()
