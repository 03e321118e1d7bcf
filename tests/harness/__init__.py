"""What tests share: real worker processes and the command line as a user runs it."""
