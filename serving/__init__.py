"""The room for gRPC services, admission and metrics, on top of `spec_jax`."""
