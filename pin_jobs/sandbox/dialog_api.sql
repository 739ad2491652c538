-- What the dialog API of the sandbox looks up in the stand-in tables of the chathouse.

-- name: find_dialog
-- The limits run out: a dialog has none to three mails an hour, and every one that is sent uses one up.
SELECT
    greatest(0, (hashtext(lady.api_id || dialog.man_ulid) & 3) - (
        SELECT count(*) FROM chathouse.inmails AS mail
        WHERE
            mail.lady_db_id = dialog.lady_db_id AND mail.man_ulid = dialog.man_ulid
            AND mail.sent_at > now() - INTERVAL '1 hour'
    )) AS available,
    ARRAY(
        SELECT jsonb_build_object('id', CAST(id AS text), 'sender', sender, 'sent_at', sent_at)
        FROM (
            SELECT activity.id, 'man' AS sender, activity.happened_at AS sent_at
            FROM chathouse.chat_activity AS activity
            WHERE activity.lady_ulid = lady.ulid AND activity.man_ulid = dialog.man_ulid
            UNION ALL
            SELECT mail.id, 'lady' AS sender, mail.sent_at
            FROM chathouse.inmails AS mail
            WHERE mail.lady_db_id = dialog.lady_db_id AND mail.man_ulid = dialog.man_ulid
        ) AS message
        ORDER BY sent_at DESC
        LIMIT 50
    ) AS messages
FROM chathouse.ladies AS lady
INNER JOIN chathouse.dialogs AS dialog ON lady.db_id = dialog.lady_db_id
WHERE lady.api_id = :lady_api_id AND dialog.man_ulid = :man_ulid
