"""The gRPC service: `proto/quire_inference.proto`, the code that is generated from it, and what answers the calls."""
