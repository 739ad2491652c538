-- What `pin-jobs check` asks any database. Everything is read from the catalogue, nothing is run.

-- name: bound_check
-- A check ends in seconds, changes nothing, and reads moments in the form that the driver knows.
SELECT set_config('statement_timeout', :timeout, true), set_config('transaction_read_only', 'on', true),
       set_config('TimeZone', 'UTC', true), set_config('DateStyle', 'ISO, YMD', true)

-- name: read_server
-- The server, and the role and its session.
SELECT CAST(current_setting('server_version_num') AS integer) AS version,
       current_setting('server_version') AS version_name, pg_is_in_recovery() AS is_standby, current_user AS role,
       role.rolsuper AS is_superuser, role.rolbypassrls AS bypasses_rls, role.rolconnlimit AS connection_limit, pg_backend_pid() AS pid,
       clock_timestamp() AS now
  FROM pg_roles AS role
 WHERE role.rolname = current_user

-- name: read_settings
-- Of the session as it was given to us: the defaults of role and database, or what a pooler left. In milliseconds.
SELECT name, CAST(setting AS integer) AS milliseconds
  FROM pg_settings
 WHERE name IN ('statement_timeout', 'lock_timeout', 'idle_in_transaction_session_timeout', 'transaction_timeout',
                'idle_session_timeout')

-- name: read_tables
-- The relations by these names, found without needing any privilege on them. The rows of a partitioned table are those
-- of its partitions: nothing keeps its own count up to date.
SELECT namespace.nspname || '.' || class.relname AS name, class.relkind AS kind,
       has_schema_privilege(namespace.oid, 'USAGE') AS is_reachable, row_security_active(class.oid) AS hides_rows,
       pg_has_role(class.relowner, 'USAGE') AS is_owned,
       CAST(CASE class.relkind
            WHEN 'p' THEN (SELECT coalesce(sum(greatest(leaf.reltuples, 0)), 0)
                             FROM pg_partition_tree(class.oid) AS part
                             JOIN pg_class AS leaf ON leaf.oid = part.relid
                            WHERE part.isleaf)
            ELSE greatest(class.reltuples, 0) END AS bigint) AS rows,
       ARRAY(SELECT privilege FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE']) AS privilege
              WHERE has_table_privilege(class.oid, privilege)) AS privileges
  FROM pg_class AS class
  JOIN pg_namespace AS namespace ON namespace.oid = class.relnamespace
 WHERE namespace.nspname || '.' || class.relname = ANY (CAST(:names AS text[]))

-- name: read_columns
-- Per column its type (a domain's is that below it) and what our role may do with it. char(n) and varchar(n) are kept
-- as n + 4.
SELECT namespace.nspname || '.' || class.relname AS table_name, attribute.attname AS name,
       format_type(base.type, NULL) AS type,
       CASE WHEN base.type IN (CAST('bpchar' AS regtype), CAST('varchar' AS regtype)) AND base.modifier > 4
            THEN base.modifier - 4 END AS length,
       attribute.attnotnull AS is_required, attribute.atthasdef OR attribute.attidentity <> '' AS has_default,
       attribute.attgenerated <> '' OR attribute.attidentity = 'a' AS is_generated,
       ARRAY(SELECT privilege FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE']) AS privilege
              WHERE has_column_privilege(class.oid, attribute.attnum, privilege)) AS privileges
  FROM pg_attribute AS attribute
  JOIN pg_class AS class ON class.oid = attribute.attrelid
  JOIN pg_namespace AS namespace ON namespace.oid = class.relnamespace
  JOIN pg_type AS type ON type.oid = attribute.atttypid
 CROSS JOIN LATERAL (SELECT CASE type.typtype WHEN 'd' THEN type.typbasetype ELSE type.oid END AS type,
                            CASE type.typtype WHEN 'd' THEN type.typtypmod ELSE attribute.atttypmod END AS modifier)
            AS base
 WHERE namespace.nspname || '.' || class.relname = ANY (CAST(:names AS text[]))
   AND attribute.attnum > 0 AND NOT attribute.attisdropped

-- name: read_indexes
-- What there is, for the rules and for the line that says what is missing. Only a btree serves more than one column in
-- their order.
SELECT namespace.nspname || '.' || class.relname AS table_name,
       pg_get_indexdef(index.indexrelid) || CASE WHEN index.indisvalid THEN '' ELSE ' (invalid)' END AS definition,
       ARRAY(SELECT coalesce(attribute.attname, '')
               FROM unnest(CAST(index.indkey AS smallint[])) WITH ORDINALITY AS key (attnum, position)
               LEFT JOIN pg_attribute AS attribute
                 ON attribute.attrelid = index.indrelid AND attribute.attnum = key.attnum
              WHERE key.position <= index.indnkeyatts
              ORDER BY key.position) AS columns,
       index.indisvalid AND method.amname = 'btree' AS is_usable, index.indisunique AS is_unique,
       index.indpred IS NOT NULL AS is_partial
  FROM pg_index AS index
  JOIN pg_class AS class ON class.oid = index.indrelid
  JOIN pg_namespace AS namespace ON namespace.oid = class.relnamespace
  JOIN pg_class AS index_class ON index_class.oid = index.indexrelid
  JOIN pg_am AS method ON method.oid = index_class.relam
 WHERE namespace.nspname || '.' || class.relname = ANY (CAST(:names AS text[]))
 ORDER BY index.indexrelid
