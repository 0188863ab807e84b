"""One inference engine on one replica: clients, processes, weight transfer. No routing, no trainers, no dialects."""
