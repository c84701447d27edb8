"""What looks after a run while nobody looks: heartbeats, failure reports, alarms, events."""
