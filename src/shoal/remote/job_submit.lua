-- Written by shoal; changes here are lost.
-- A job stays on one site unless it says how many it may span: --switches=2.
local largest_site = @LARGEST@

local function given(number)
    return number ~= nil and number > 0 and number < 0xfffffff0
end

function slurm_job_submit(job, partitions, uid)
    if given(job.req_switch) then
        return slurm.SUCCESS
    end
    if given(job.min_nodes) and job.min_nodes > largest_site then
        slurm.log_user("no site has " .. job.min_nodes .. " nodes; "
            .. "a job that may span sites says how many: --switches=2")
        return slurm.ERROR
    end
    job.req_switch = 1
    job.wait4switch = @SWITCH_WAIT_S@
    return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
    return slurm.SUCCESS
end

return slurm.SUCCESS
