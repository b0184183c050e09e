"""How far live answers are from the reference, and what to do about it: no threads, no engine, no clock of its own."""
