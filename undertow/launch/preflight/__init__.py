"""What a node has to reach others with, which variables of NCCL and gloo follow, and what differs between two nodes."""
