"""The command line client of dskd. Needs no engine: only the protocol, gRPC and rich."""

import os

# gRPC logs connection failures of its own to stderr; dskctl says them in its own words. Read when grpc is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
