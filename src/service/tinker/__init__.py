"""The server of Tinker's protocol: what its client (`tinker`) asks for, done by this cluster's trainer and replicas."""
