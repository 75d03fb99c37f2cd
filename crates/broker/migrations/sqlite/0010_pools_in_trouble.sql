-- How often in a row a pool's sandboxes could not be started, when that is tried again, and why they lack.
ALTER TABLE pools ADD COLUMN failures INTEGER NOT NULL DEFAULT 0;
ALTER TABLE pools ADD COLUMN retry_at INTEGER;
ALTER TABLE pools ADD COLUMN reason TEXT;

-- Who waits for a sandbox by its name learns that it failed.
CREATE INDEX sandboxes_once_named ON sandboxes (workspace_id, name, id) WHERE name IS NOT NULL AND ended_at IS NOT NULL;
