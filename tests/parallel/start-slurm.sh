#!/usr/bin/env bash
# A SLURM of one machine for the tests: munge, slurmctld and slurmd from Debian's packages slurm-wlm and munge, started as root.
# Needs no systemd, so it works in a container too. Does nothing where a SLURM already answers, starts only the daemons that
# are missing, and never overwrites a configuration that it did not write. Logs are in /var/log/slurm.
# Stop it with: kill $(cat /run/slurmd.pid /run/slurmctld.pid /run/munge/munged.pid)
set -euo pipefail
export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"

conf=/etc/slurm/slurm.conf
mark="# Written by Forgefield's tests/parallel/start-slurm.sh"

fail() { echo "start-slurm.sh: $*" >&2; exit 1; }
controller_is_up() { timeout 5 scontrol ping 2>/dev/null | grep -q 'is UP'; }
node_state() { timeout 5 sinfo --noheader --format=%T 2>/dev/null; }
node_is_up() { node_state | grep -qE '^(idle|mixed|allocated|completing|planned)$'; }
slurmd_is_up() { timeout 5 scontrol show slurmd >/dev/null 2>&1; }
ours() { grep -qsF "$mark" "$conf"; }
# The controller believes in a node for minutes after its slurmd died: ours must answer itself.
slurm_is_up() { controller_is_up && node_is_up && { ! ours || slurmd_is_up; }; }
munge_is_up() { timeout 5 munge --no-input 2>/dev/null | timeout 5 unmunge >/dev/null 2>&1; }
wait_until() { # wait_until SECONDS CONDITION
    local end=$((SECONDS + $1))
    until "$2"; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.2
    done
}

if slurm_is_up; then exit 0; fi
[ "$(id -u)" = 0 ] || fail "only root can start a SLURM"
for program in munged munge slurmctld slurmd sinfo scontrol; do
    command -v "$program" >/dev/null || fail "$program is missing: apt-get install slurm-wlm munge"
done

# Two test processes may arrive at once: the second waits, and then finds SLURM running. The daemons must not hold the
# lock, hence their 9>&-.
exec 9>/run/forgefield-start-slurm.lock
flock --wait 120 9 || fail "another start is still going on after two minutes"
if slurm_is_up; then exit 0; fi
if [ -f "$conf" ] && ! ours; then
    fail "$conf belongs to another SLURM, which does not answer: start that one, or move the file away"
fi

mkdir -p /run/munge /etc/munge /var/lib/munge /var/log/munge /etc/slurm /var/log/slurm /var/spool/slurmctld /var/spool/slurmd
if ! munge_is_up; then
    [ -s /etc/munge/munge.key ] || (umask 077 && head -c 1024 /dev/urandom >/etc/munge/munge.key)
    chown -R munge:munge /etc/munge /run/munge /var/lib/munge /var/log/munge
    chmod 400 /etc/munge/munge.key
    chmod 755 /run/munge
    runuser -u munge -- "$(command -v munged)" --force 9>&-
    wait_until 10 munge_is_up || fail "munge does not answer; see /var/log/munge/munged.log"
fi

# Four CPUs are declared however many there are, so that jobs of four tasks start on a machine of two (config_overrides).
# A requeued job waits for cred_expire before it starts again, and is then found by the next pass of the scheduler
# (sched_interval): the defaults, 120 s and 60 s, are made for clusters that run for years.
host=$(hostname -s)
memory=$(awk '/^MemTotal/ {print int($2 / 1024)}' /proc/meminfo)
if ! controller_is_up; then
    cat >"$conf" <<CONF
$mark
ClusterName=forgefield
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
JobRequeue=1
KillWait=10
SchedulerParameters=sched_interval=2,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
NodeName=$host NodeAddr=127.0.0.1 CPUs=4 RealMemory=$memory State=UNKNOWN
PartitionName=debug Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
    slurmctld -c 9>&-
    wait_until 20 controller_is_up || fail "slurmctld does not answer; see /var/log/slurm/slurmctld.log"
fi
slurmd_is_up || slurmd 9>&-
# A job whose processes would not die has its node drained, for an administrator to look at.
if node_state | grep -q '^drain'; then scontrol update NodeName="$host" State=RESUME; fi
wait_until 30 slurm_is_up || fail "the node does not come up; see /var/log/slurm/slurmd.log"
