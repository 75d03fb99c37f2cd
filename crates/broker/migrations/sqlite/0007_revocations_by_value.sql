-- Also to find one by what it revokes, and still to count and list those of a sandbox or a workspace.
CREATE INDEX revocations_by_value ON revocations (workspace_id, sandbox_id, kind, value);
DROP INDEX revocations_of_workspace;
