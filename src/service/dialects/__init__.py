"""The dialects: each module turns bodies of one into `service.requests.Asked`, and answers into bodies and events."""
