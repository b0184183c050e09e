"""Plain graphs as models of the daemon: named tensors in, named tensors out, batched between two flips."""
