"""Lightning's side: processes, replicas, checkpoints, and the engine within Lightning's loops."""
