# Written by shoal: on TERM this container deletes itself with its own key, since one that has ended is still billed.
end() {
    python3 - <<'text'
import os, urllib.request
call = urllib.request.Request("@API@/api/v0/instances/" + os.environ["CONTAINER_ID"] + "/", method="DELETE")
call.add_header("Authorization", "Bearer " + os.environ["CONTAINER_API_KEY"])
urllib.request.urlopen(call, timeout=30)
text
    exit
}
trap end TERM
