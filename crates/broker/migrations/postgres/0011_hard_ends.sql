-- running_since is from now on the time up to which active_seconds counts: it moves forward while a sandbox runs.
-- The last session of a scope: after a hard end, the scope's next session gets the same sandbox.
CREATE INDEX sessions_past_of_scope ON sessions (workspace_id, scope_type, scope_id, id) WHERE ended_at IS NOT NULL;
