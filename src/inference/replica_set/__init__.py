"""The one owner of the replicas: it knows its members, brings them new weights, and publishes the table that routers
read."""
