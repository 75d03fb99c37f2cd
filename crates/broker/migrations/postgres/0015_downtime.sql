-- Up to when a node's broker has counted how long it keeps suspended and deleted sandboxes. Time in which it did not run does not count.
CREATE TABLE node_clocks (
    node_id       TEXT PRIMARY KEY,
    counted_until BIGINT NOT NULL
);
-- Nothing was counted so far: a node counts as having run until the last change of its sandboxes, so that all of them are kept for longer.
INSERT INTO node_clocks (node_id, counted_until)
SELECT node_id, MAX(GREATEST(created_at, last_active_at, COALESCE(running_since, 0), COALESCE(suspended_at, 0), COALESCE(ended_at, 0)))
FROM sandboxes GROUP BY node_id;
-- Time since its suspension that does not count.
ALTER TABLE sandboxes ADD COLUMN downtime_seconds BIGINT NOT NULL DEFAULT 0;
DROP INDEX sandboxes_suspended;
CREATE INDEX sandboxes_suspended ON sandboxes (node_id, (suspended_at + downtime_seconds)) WHERE state = 'suspended';
