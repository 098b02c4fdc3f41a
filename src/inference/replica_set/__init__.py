"""The one owner of the replicas: membership, updates, and the table that routers read."""
