-- A deleted sandbox keeps its files until this time and can be restored until then. Null: it lives, or its files are gone.
ALTER TABLE sandboxes ADD COLUMN restore_until BIGINT;
CREATE INDEX sandboxes_restorable ON sandboxes (node_id, restore_until) WHERE restore_until IS NOT NULL;
CREATE INDEX sandboxes_deleted ON sandboxes (workspace_id, ended_at) WHERE restore_until IS NOT NULL;
