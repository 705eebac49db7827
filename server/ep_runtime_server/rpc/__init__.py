"""The gRPC servers: a servicer per service, checks of each call, and conversion to messages."""
