"""The server of Tinker's protocol: the trainer and the replicas of this cluster work on requests from Tinker's client
(the package `tinker`)."""
