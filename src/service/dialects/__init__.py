"""The dialects: each module turns bodies of one into `service.asked.Asked`, and answers into bodies and events."""
