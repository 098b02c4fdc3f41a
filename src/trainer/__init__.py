"""The trainer room: FSDP2 shards as Ray actors, and the handle through which the driver calls them all."""
