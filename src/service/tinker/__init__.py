"""The server of Tinker's protocol: this cluster's trainer and replicas work on the requests of its client
(`tinker`).
"""
