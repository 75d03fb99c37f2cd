-- How long a sandbox of its own wish waits for a use before it is suspended, and how long it is then kept; at most as long as
-- the deployment says. Null: as long as that.
ALTER TABLE sandboxes ADD COLUMN lease_seconds BIGINT;
ALTER TABLE sandboxes ADD COLUMN keep_suspended_seconds BIGINT;

-- Those that may be due before all others are.
CREATE INDEX sandboxes_with_own_end ON sandboxes (node_id) WHERE state = 'suspended' AND keep_suspended_seconds IS NOT NULL;
